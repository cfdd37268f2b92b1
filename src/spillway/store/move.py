"""Moves a store to other drives: the saved point is copied, checked and committed there, and only then removed here."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spillway.native import DiskEngine
from spillway.spec.errors import DiskError
from spillway.store.arena import Arena
from spillway.store.disk import Extent, Geometry, StripedDisk, locked
from spillway.store.manifest import Manifest, load_manifests, manifest_files, save_manifest, spare_files
from spillway.store.space import Space

_WINDOW_BYTES = 32 << 20


def find_geometry(directory: Path, manifest: Manifest, paths: tuple[Path, ...]) -> Geometry | None:
    """How the saved point in `directory` lies on `paths`; None where it lies elsewhere and has to be moved. Drives that
    are mounted elsewhere now carry their part, manifest included, to the new paths.

    Raises DiskError where it is neither there nor where it was.
    """
    was = manifest.geometry
    if {path.resolve() for path in paths} == {Path(path).resolve() for path in was.paths}:
        return was
    if len(paths) == len(was.paths) and directory.resolve() == paths[0].resolve():
        here = Geometry(tuple(map(str, paths)), was.shares, was.generation)
        if all(file.exists() for file in here.files()):
            return here
    lost = [file for file in was.files() if not file.exists()]
    if lost:
        raise DiskError(f"{lost[0]}, a part of the saved run, is missing: bring its drive back")
    return None


def move(
    directory: Path,
    manifest: Manifest,
    paths: tuple[Path, ...],
    shares: tuple[int, ...],
    progress: Callable[[int], None],
    check: Callable[[Manifest], None],
) -> dict[str, int]:
    """Copy the saved point in `directory` to other paths. `progress` is called with bytes copied; `check` with the
    copy, when it is durable, and raises DiskError where it is not whole. Returns the bytes written to each path. Raises
    DiskError for that and for want of room; nothing is lost then."""
    was = manifest.geometry
    there = Geometry(tuple(map(str, paths)), shares, was.generation + 1)
    space = Space([])
    places = [space.allocate(unit.num_bytes) for unit in manifest.units]
    new = StripedDisk(there, keep=False)
    try:
        try:
            old = StripedDisk(was, keep=True, locked=there.paths)
        except BaseException:
            new.close()
            raise
        try:
            new.reserve(space.end)
            for unit, place in zip(manifest.units, places, strict=True):
                _copy(old, Extent(unit.offset, unit.num_bytes), new, place, progress)
            new.sync()
            written = new.written_bytes
        finally:
            old.close()
            new.close()
        units = tuple(replace(unit, offset=place.offset) for unit, place in zip(manifest.units, places, strict=True))
        moved = replace(manifest, units=units, geometry=there)
        check(moved)
    except BaseException:
        for file in there.files():  # perhaps all the room that there is
            file.unlink(missing_ok=True)
        raise
    save_manifest(paths[0], moved)
    for file in was.files():
        file.unlink(missing_ok=True)
    if directory.resolve() != paths[0].resolve():
        _drop_points(directory)
    return written


def drop_left_behind(before: tuple[Path, ...], now: Geometry) -> None:
    """Remove what a move that was killed at its end has left under the store paths of before, if it has; of a store
    that somebody uses, nothing."""
    left = [path for path in before if path not in now.directories and path.exists()]
    if not left or not now.generation:
        return
    found = load_manifests(before[0])[0] if before[0] in left else []
    if any(manifest.geometry.generation >= now.generation for manifest in found):
        return
    for path in left:
        with suppress(DiskError), locked(path):
            for file in path.glob("spillway.data*"):
                if file.name != now.file_name:  # a copy of what is in use may be somebody's backup
                    file.unlink(missing_ok=True)
            _drop_points(path)


def _drop_points(directory: Path) -> None:
    """Manifests, and the room for more."""
    for file in [*(file for _, file in manifest_files(directory)), *spare_files(directory)]:
        file.unlink(missing_ok=True)


def _copy(old: StripedDisk, source: Extent, new: StripedDisk, target: Extent, progress: Callable[[int], None]) -> None:
    engine, window = DiskEngine(), Arena(_WINDOW_BYTES).buffer
    try:
        for at in range(0, source.num_bytes, _WINDOW_BYTES):
            piece = window[: min(_WINDOW_BYTES, source.num_bytes - at)]
            old.read(engine, Extent(source.offset + at, piece.numel()), piece)
            new.write_all(engine, [(Extent(target.offset + at, piece.numel()), piece)])
            progress(piece.numel())
    finally:
        engine.close()
