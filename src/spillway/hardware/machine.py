"""This machine, measured: cached, so that planning is instant the next time."""

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from spillway.durable import write_whole
from spillway.hardware.drives import endurance_of
from spillway.hardware.limits import free_host_bytes, process_bytes
from spillway.hardware.probe import measure
from spillway.spec.hardware import HardwareSpec
from spillway.spec.jsonable import from_json, to_json
from spillway.spec.machine import Drive, Machine
from spillway.spec.state import EXACT
from spillway.store.disk import existing

_FRESH_S = 7 * 24 * 3600
# A block large enough that its rate is that of larger ones.
_ROWS, _HIDDEN = 1024, 2048
_ROOM_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Measured:
    """A probe's result and when it was made (seconds since the epoch)."""

    hardware: HardwareSpec
    when: float


def this_machine(
    paths: tuple[Path, ...],
    free_disk_bytes: int,
    dtype: torch.dtype = torch.bfloat16,
    refresh: bool = False,
    device: str = "auto",
) -> Machine:
    """Rates of this machine with these store paths, this device and for models of this dtype, from the cache where it
    is fresh, and what is free now."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(kind if device == "auto" else device)
    hardware = _measured(paths, dtype, refresh, where)
    host = free_host_bytes() + process_bytes()
    on_device = int(torch.cuda.mem_get_info(where)[0]) if where.type == "cuda" else host
    drives = _drives(paths, hardware, free_disk_bytes)
    return Machine(platform.node() or "this machine", hardware, on_device, host, free_disk_bytes, drives=drives)


def _drives(paths: tuple[Path, ...], hardware: HardwareSpec, free_bytes: int) -> tuple[Drive, ...]:
    """Those that the paths lie on, each with an equal share of what was measured of all."""
    places = [existing(path) for path in paths]
    different = {place.stat().st_dev: place for place in places}.values()
    count = len(different)
    return tuple(
        Drive(
            str(place),
            free_bytes // count,
            hardware.read_bytes_per_s / count,
            hardware.write_bytes_per_s / count,
            endurance_of(place),
            0.0,
            "measured here",
        )
        for place in different
    )


def _measured(paths: tuple[Path, ...], dtype: torch.dtype, refresh: bool, device: torch.device) -> HardwareSpec:
    file = cache_directory() / f"probe-{machine_key(str(device), paths)}-{str(dtype).removeprefix('torch.')}.json"
    if not refresh:
        try:
            known = from_json(Measured, json.loads(file.read_text()))
            if time.time() - known.when < _FRESH_S:
                return known.hardware
        except (OSError, ValueError, KeyError, TypeError):
            pass  # never measured, or by another version

    room = min(_ROOM_BYTES, free_host_bytes() // 2)
    there = int(torch.cuda.mem_get_info(device)[0]) // 2 if device.type == "cuda" else room
    found = measure(device, dtype, paths, _ROWS, _HIDDEN, EXACT, room, there)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(to_json(Measured(found, time.time()))))
    except OSError:
        pass  # a home that cannot be written only costs the next measurement
    return found


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
