"""What a run directory says about its run."""

import hashlib
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from spillway.api import as_dtype, load
from spillway.checkpoint.points import fingerprint
from spillway.integrations.huggingface import CAUSAL_LM
from spillway.model.units import Unit, find_units
from spillway.optim.config import settings_of, state_format
from spillway.spec.errors import DiskError, UsageError
from spillway.spec.options import TrainOptions
from spillway.store.manifest import Manifest, load_manifests, manifest_files

_SAVED = "saved-step"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run on disk: how it was started, its model without weights, and its saved points (the newest first)."""

    options: TrainOptions
    model: nn.Module
    units: tuple[Unit, ...]
    points: tuple[Manifest, ...]
    damaged: tuple[str, ...]  # saved points that cannot be read, and why


def read_options(run: Path) -> TrainOptions:
    """The options a run was last started with. Raises UsageError where the directory is no run."""
    path = run / "config.json"
    try:
        values: dict[str, Any] = {name: entry["value"] for name, entry in json.loads(path.read_text()).items()}
    except FileNotFoundError as error:
        raise UsageError(f"{run} is not a run directory: it has no config.json") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not of a run: choose another directory") from error
    known = {field.name for field in fields(TrainOptions)}
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in known
    }
    if "output_dir" not in kept:
        raise UsageError(f"{path} is not of a run: choose another directory")
    return TrainOptions(**kept)


def is_run(directory: Path) -> bool:
    """Whether it is a run's."""
    try:
        read_options(directory)
    except UsageError:
        return False
    return True


def is_free(run: Path) -> bool:
    """Whether a run may use the directory: new, or a run's already."""
    if not (run / "config.json").exists():
        return not (run / "metrics.jsonl").exists() and not any(run.glob("*.safetensors"))
    return is_run(run)


def note_saved(run: Path, step: int) -> None:
    """Remember in the run directory that a saved point was made, wherever its store is."""
    (run / _SAVED).write_text(f"{step}\n")


def saved_step(run: Path) -> int:
    """The last step that was saved; 0 for none."""
    try:
        return int((run / _SAVED).read_text())
    except (OSError, ValueError):
        return 0


def losses_shown(run: Path, last_step: int | None = None) -> list[float]:
    """The loss of every step in the metrics of a run, up to `last_step`."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break  # cut off by a crash
        if last_step is None or row["step"] <= last_step:
            found.append(float(row["loss"]))
    return found


def store_directories(options: TrainOptions, run: Path) -> tuple[Path, ...]:
    """One directory for this run under every --store path; without any, those of last time, or inside the run."""
    if not options.store and (run / "config.json").exists():
        options = replace(options, store=read_options(run).store)
    if not options.store:
        return (run / "store",)
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
    return tuple(Path(os.path.expanduser(path)) / f"spillway-{run.name}-{digest}" for path in options.store)


def where_saved(options: TrainOptions, run: Path) -> Path:
    """The directory with the saved points: under the first store path of now or of last time, or in the run."""
    candidates = [*store_directories(options, run)]
    if (run / "config.json").exists():
        candidates += store_directories(read_options(run), run)
    candidates.append(run / "store")
    return next((path for path in candidates if manifest_files(path)), candidates[0])


def open_run(run: Path) -> SavedRun:
    """Read a run directory. Raises UsageError where it is none or holds no saved point, DiskError where the saved
    points are of another model or all damaged."""
    options = read_options(run)
    directory = where_saved(options, run)
    good, bad = load_manifests(directory)
    if not good and bad:
        raise DiskError(bad[0])
    if not good:
        raise UsageError(f"{run} holds no saved point yet: {directory} is empty")
    model = load(options.model, CAUSAL_LM, as_dtype(options.dtype), allow_pickle=options.allow_pickle)
    units = find_units(model, state_format(settings_of(options)))
    if good[0].model_fingerprint != fingerprint(units):
        raise DiskError(f"{directory} was saved from another model than {options.model} now is: bring that model back")
    return SavedRun(options, model, units, tuple(_located(point, directory) for point in good), tuple(bad))


def _located(point: Manifest, directory: Path) -> Manifest:
    """The saved point with its first part where it was found: the run may have been moved."""
    geometry = replace(point.geometry, paths=(str(directory.resolve()), *point.geometry.paths[1:]))
    return replace(point, geometry=geometry) if geometry.files()[0].exists() else point
