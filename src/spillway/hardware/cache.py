"""What was measured of this machine, kept for the processes to come."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from spillway.durable import write_whole
from spillway.store.disk import existing

# How long a measurement is good for, and one that others disturbed.
FRESH_S, DISTURBED_FRESH_S = 24 * 3600, 10 * 60


def cache_directory() -> Path:
    """Where measurements are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spillway"


def machine_key(device: str, paths: tuple[Path, ...]) -> str:
    """Changes with the hardware and with PyTorch, not with the time."""
    parts: list[Any] = [platform.processor(), os.cpu_count(), psutil.virtual_memory().total, torch.__version__]
    parts.append("cpu" if device == "cpu" else torch.cuda.get_device_name(torch.device(device)))
    parts += [existing(path).stat().st_dev for path in paths]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def recall(device: str, what: Hashable) -> Any:
    """The JSON value that was kept of it; None where it was not, or too long ago."""
    until, value = _read(_file(device)).get(repr(what), (0.0, None))
    return value if time.time() < until <= time.time() + FRESH_S else None


def keep(device: str, what: Hashable, value: Any, seconds: float = FRESH_S) -> None:
    """A JSON value, for so long. A home that cannot be written only costs the next measurement."""
    file = _file(device)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({**_read(file), repr(what): (time.time() + seconds, value)}))


def forget(device: str) -> None:
    """All that was kept of this machine with the device."""
    with suppress(OSError):
        _file(device).unlink(missing_ok=True)


def _file(device: str) -> Path:
    return cache_directory() / f"rates-{machine_key(device, ())}.json"


def _read(file: Path) -> dict[str, tuple[float, Any]]:
    try:
        return {str(what): (float(until), value) for what, (until, value) in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # never measured, or by another version
