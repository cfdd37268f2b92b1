"""How wrong predictions were on this machine: kept after a run, part of the next prediction."""

import json
import os
from pathlib import Path

from spillway.hardware.machine import cache_directory, machine_key

# A run says so much about the next one; the rest is what was known before.
_WEIGHT = 0.5
_LEAST, _MOST = 0.5, 2.0  # beyond that something else was going on


def calibration(paths: tuple[Path, ...], device: str, bottleneck: str) -> float:
    """Measured over predicted seconds of a step in earlier runs with this device and these drives that were held up by
    the same lane; 1 where there were none."""
    return _read(_file(paths, device)).get(bottleneck, 1.0)


def note_run(paths: tuple[Path, ...], device: str, bottleneck: str, predicted_s: float, measured_s: float) -> None:
    """A run is over. `predicted_s`: without any calibration."""
    if predicted_s <= 0 or measured_s <= 0:
        return
    file = _file(paths, device)
    known = _read(file)
    ratio = min(max(measured_s / predicted_s, _LEAST), _MOST)
    known[bottleneck] = ratio if bottleneck not in known else _WEIGHT * ratio + (1 - _WEIGHT) * known[bottleneck]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known))
        os.replace(temporary, file)
    except OSError:
        pass  # a home that cannot be written only leaves the next prediction as it is


def _file(paths: tuple[Path, ...], device: str) -> Path:
    return cache_directory() / f"calibration-{machine_key(device, paths)}.json"


def _read(file: Path) -> dict[str, float]:
    try:
        return {str(lane): float(ratio) for lane, ratio in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # never run, or by another version
