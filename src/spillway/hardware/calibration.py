"""What runs on this machine have shown of it: kept after a run, part of what the next one is planned with."""

import json
import math
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from spillway.durable import write_whole
from spillway.hardware.cache import cache_directory, machine_key
from spillway.spec.hardware import HardwareSpec

# A run says so much about the next one; the rest is what was known before.
_WEIGHT = 0.5
_LEAST, _MOST = 0.5, 2.0  # beyond that something else was going on, then or when they were measured
_HOST_EXTRA = "host_extra_bytes"
_RATES = {field.name for field in fields(HardwareSpec) if field.name.endswith("_per_s")}


def as_seen(probed: HardwareSpec, paths: tuple[Path, ...]) -> HardwareSpec:
    """The machine with the rates that earlier runs with this device and these drives had; as probed where none were."""
    known = _read(_file(paths, probed.device))
    return replace(probed, **{name: known[name] * getattr(probed, name) for name in _RATES & known.keys()})


def note_rates(paths: tuple[Path, ...], probed: HardwareSpec, seen: HardwareSpec) -> None:
    """A run is over. `probed`: without any calibration; `seen`: as its steps showed. What is too far off says nothing
    of the next run."""
    ratios = _ratios(probed, seen)
    _note(paths, probed.device, {name: ratio for name, ratio in ratios.items() if _LEAST <= ratio <= _MOST})


def is_doubtful(probed: HardwareSpec, seen: HardwareSpec) -> bool:
    """Whether a rate is so far off that the machine should be measured anew."""
    return any(not _LEAST <= ratio <= _MOST for ratio in _ratios(probed, seen).values())


def _ratios(probed: HardwareSpec, seen: HardwareSpec) -> dict[str, float]:
    measured = (name for name in _RATES if 0 < getattr(probed, name) < math.inf)
    return {name: getattr(seen, name) / getattr(probed, name) for name in measured}


def host_extra(paths: tuple[Path, ...], device: str) -> int:
    """Bytes of host memory that earlier runs took beyond their plans' peaks: below 0 where they took less; 0 where
    there were none. What is promised is the plan's peak all the same."""
    return int(_read(_file(paths, device)).get(_HOST_EXTRA, 0.0))


def note_host_peak(paths: tuple[Path, ...], device: str, planned: int, measured: int) -> None:
    """A run is over: its planned and measured peak of host memory, in bytes."""
    _note(paths, device, {_HOST_EXTRA: float(measured - planned)})


def _note(paths: tuple[Path, ...], device: str, found: dict[str, float]) -> None:
    file = _file(paths, device)
    known = _read(file)
    for name, value in found.items():
        known[name] = value if name not in known else _WEIGHT * value + (1 - _WEIGHT) * known[name]
    with suppress(OSError):  # a home that cannot be written only leaves the next prediction as it is
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(known))


def _file(paths: tuple[Path, ...], device: str) -> Path:
    return cache_directory() / f"seen-{machine_key(device, paths)}.json"


def _read(file: Path) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # never run, or by another version
