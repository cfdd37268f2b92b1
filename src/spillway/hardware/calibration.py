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
# Further off than that something else was going on, then or when they were measured; unless the next run, whose rates
# were measured anew, is off by about as much again: a drive may be fast for only as long as one measures it.
_LEAST, _MOST = 0.5, 2.0
_AGAIN = 1.5
_DOUBTED = "doubted "
_HOST_EXTRA = "host_extra_bytes"
_RATES = {field.name for field in fields(HardwareSpec) if field.name.endswith("_per_s")}


def as_seen(probed: HardwareSpec, paths: tuple[Path, ...]) -> HardwareSpec:
    """The machine with the rates that earlier runs with this device and these drives had; as probed where none were."""
    known = _read(_file(paths, probed.device))
    return replace(probed, **{name: known[name] * getattr(probed, name) for name in _RATES & known.keys()})


def note_rates(paths: tuple[Path, ...], probed: HardwareSpec, seen: HardwareSpec) -> None:
    """A run is over. `probed`: without any calibration; `seen`: as its steps showed. What is too far off is only
    believed when it is seen again."""
    file = _file(paths, probed.device)
    known, believed = _read(file), dict[str, float]()
    for name, ratio in _ratios(probed, seen).items():
        doubted = known.pop(_DOUBTED + name, None)
        if _is_near(ratio, known.get(name, 1.0)):
            believed[name] = ratio
        elif doubted is not None and 1 / _AGAIN <= ratio / doubted <= _AGAIN:
            known[name] = ratio  # what was known before is of something else
        else:
            known[_DOUBTED + name] = ratio
    _write(file, _averaged(known, believed))


def is_doubtful(paths: tuple[Path, ...], probed: HardwareSpec, seen: HardwareSpec) -> bool:
    """Whether a rate is so far from what is known of it that the machine should be measured anew."""
    known = _read(_file(paths, probed.device))
    return not all(_is_near(ratio, known.get(name, 1.0)) for name, ratio in _ratios(probed, seen).items())


def _is_near(ratio: float, expected: float) -> bool:
    return _LEAST <= ratio / expected <= _MOST


def _ratios(probed: HardwareSpec, seen: HardwareSpec) -> dict[str, float]:
    measured = (name for name in _RATES if 0 < getattr(probed, name) < math.inf)
    return {name: getattr(seen, name) / getattr(probed, name) for name in measured}


def host_extra(paths: tuple[Path, ...], device: str) -> int:
    """Bytes of host memory that earlier runs took beyond their plans' peaks: below 0 where they took less; 0 where
    there were none. What is promised is the plan's peak all the same."""
    return int(_read(_file(paths, device)).get(_HOST_EXTRA, 0.0))


def note_host_peak(paths: tuple[Path, ...], device: str, planned: int, measured: int) -> None:
    """A run is over: its planned and measured peak of host memory, in bytes."""
    file = _file(paths, device)
    _write(file, _averaged(_read(file), {_HOST_EXTRA: float(measured - planned)}))


def _averaged(known: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    """What is known, after these were found."""
    new = {name: _WEIGHT * value + (1 - _WEIGHT) * known.get(name, value) for name, value in found.items()}
    return {**known, **new}


def _write(file: Path, known: dict[str, float]) -> None:
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
