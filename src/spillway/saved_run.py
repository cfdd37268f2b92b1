"""A run as it lies on disk: its options, its model without weights, its saved points."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from spillway.api import as_dtype, load
from spillway.checkpoint.usable import usable
from spillway.integrations.huggingface import CAUSAL_LM
from spillway.model.units import Unit, find_units
from spillway.optim.config import settings_of, state_format
from spillway.rundir import read_options, refuse_lost_store, stores_of_last_time, where_saved
from spillway.spec.errors import DiskError, UsageError
from spillway.spec.options import TrainOptions
from spillway.store.manifest import Manifest, manifest_files


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run on disk: how it was started, its model without weights, and its saved points (the newest first)."""

    options: TrainOptions
    model: nn.Module
    units: tuple[Unit, ...]
    points: tuple[Manifest, ...]
    damaged: tuple[str, ...]  # saved points that cannot be read, and why


def open_run(run: Path) -> SavedRun:
    """Read a run directory. Raises UsageError where it is none or holds no saved point, DiskError where the saved
    points are of another model, all damaged or not where they were."""
    options = read_options(run)
    directory = where_saved(options, run)
    if not manifest_files(directory):
        refuse_lost_store(run, directory)
        raise UsageError(f"{run} holds no saved point yet: {directory} is empty")
    model = load(options.model, CAUSAL_LM, as_dtype(options.dtype), allow_pickle=options.allow_pickle)
    units = find_units(model, state_format(settings_of(options)))
    found = usable(directory, units)
    if not found.points:
        raise DiskError(f"{run} has no saved point of {options.model} as that model is now: {found.problems[0]}")
    stores = stores_of_last_time(run)
    points = tuple(_located(point, directory, stores) for point in found.points)
    return SavedRun(options, model, units, points, found.problems)


def _located(point: Manifest, directory: Path, stores: tuple[Path, ...]) -> Manifest:
    """The saved point with its first part where it was found, for the run may have been moved, and each other one that
    is not where it was, for its drive may be mounted elsewhere, where the run's `stores` are now."""
    was = point.geometry
    if not (directory / was.file_name).exists():
        return point
    now = stores if len(stores) == len(was.paths) else was.directories
    others = (
        before if (before / was.file_name).exists() else after
        for before, after in zip(was.directories[1:], now[1:], strict=True)
    )
    paths = (str(directory.resolve()), *(str(path) for path in others))
    return replace(point, geometry=replace(was, paths=paths))
