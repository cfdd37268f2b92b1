"""Where a run's store lies: a new one, the one of last time, or that one moved to other drives."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from spillway.checkpoint.points import SavedPoints
from spillway.checkpoint.usable import usable
from spillway.hardware.bandwidth import measure_shares
from spillway.spec.errors import NothingSaved, StoreMoves, UsageError
from spillway.spec.progress import Counting
from spillway.spec.sizes import format_size
from spillway.store.disk import Geometry, refuse_foreign
from spillway.store.manifest import load_manifests, manifest_files
from spillway.store.move import find_geometry, move


def place_store(
    points: SavedPoints, paths: tuple[Path, ...], resume: bool | str | os.PathLike[str], counting: Counting
) -> Geometry | None:
    """How the store is cut over its drives: as it was, or, for a new or moved one, by their measured speed. `points`
    then knows its saved points and their directory; None without paths. `counting`: hears of the bytes of one that is
    moved.

    Raises UsageError where a run would be overwritten or there is none to go on from, DiskError where it is damaged.
    """
    named = Path(resume).expanduser().resolve() if isinstance(resume, (str, os.PathLike)) else None
    if not paths:
        if resume:
            raise UsageError("resume= needs store=: the directories that training goes on in")
        return None
    if named is not None and named != paths[0] and manifest_files(paths[0]):
        if not _has_moved(points, named, paths[0]):
            raise UsageError(f"{paths[0]} holds another run than {named}: choose an empty store to move that one to")
        named = paths[0]
    directory = points.directory = named or _holder(paths)
    found = points.find(bool(resume))
    if not found:
        if named is not None:
            raise UsageError(f"there is no saved point in {named} to resume from")
        if resume:
            warnings.warn(f"{paths[0]} holds no saved point: training starts anew", NothingSaved, stacklevel=4)
        refuse_foreign(paths)
        return Geometry(tuple(map(str, paths)), measure_shares(paths))
    geometry = find_geometry(directory, found[0], paths)
    if geometry is None:
        size = sum(unit.num_bytes for unit in found[0].units)
        others = f"; the {len(found) - 1} saved before it are left behind and removed" if len(found) > 1 else ""
        warnings.warn(
            f"step {found[0].step} ({format_size(size)}) is checked and moved from {directory} to "
            f"{', '.join(map(str, paths))}{others}",
            StoreMoves,
            stacklevel=4,
        )
        with counting("checking and moving the store", 3 * size) as counter:
            advance = counter.advance
            whole = points.first_whole(advance)
            refuse_foreign(tuple(path for path in paths if str(path) not in whole.geometry.paths))
            shares = measure_shares(paths)
            points.moved_bytes = move(
                directory, whole, paths, shares, advance, lambda copy: points.check(copy, advance)
            )
        points.directory = paths[0]
        geometry = points.find(True)[0].geometry
    elif geometry.generation == found[0].geometry.generation:
        points.new_names = dict(zip(found[0].geometry.paths, geometry.paths, strict=True))
        if len(paths) > 1 and any(was != now for was, now in points.new_names.items()):
            names = ", ".join(f"{now} for {was}" for was, now in points.new_names.items())
            warnings.warn(f"drives are mounted elsewhere and taken in this order: {names}", StoreMoves, stacklevel=4)
    points.step_over_short(geometry)
    points.directory = Path(geometry.paths[0])
    return geometry


def _has_moved(points: SavedPoints, before: Path, now: Path) -> bool:
    """Whether the run of `before` was moved to `now` already: the same call is made again."""
    here, there = (usable(path, points.units).points for path in (now, before))
    if not here or not here[0].geometry.generation:
        return False
    return not manifest_files(before) or any(
        (point.step, point.geometry.generation + 1) == (here[-1].step, here[-1].geometry.generation) for point in there
    )


def _holder(paths: tuple[Path, ...]) -> Path:
    """The path with the manifests: the first, or another where the order was changed. Raises UsageError where another
    path holds a run of other paths."""
    for path in paths[1:]:
        found = load_manifests(path)[0]
        if not found:
            continue
        if {Path(was).resolve() for was in found[0].geometry.paths} == set(paths):
            return path
        raise UsageError(f"{path} holds step {found[0].step} of another run: choose other store paths")
    return paths[0]


def store_paths(
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> tuple[Path, ...]:
    """One or more directories as absolute paths. Raises UsageError for one that is given twice."""
    if store is None:
        return ()
    given = [store] if isinstance(store, (str, os.PathLike)) else list(store)
    paths = tuple(Path(path).expanduser().resolve() for path in given)
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UsageError(f"the store path {twice} is given twice: once is enough")
    return paths
