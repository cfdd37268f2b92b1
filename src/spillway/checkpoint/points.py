"""Saved points: what is committed, when, and how a run goes on from it."""

import base64
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spillway.checkpoint import generators
from spillway.checkpoint.saved import SavedPoint, compare, expected_checks
from spillway.checkpoint.usable import fingerprint, usable
from spillway.model.units import Unit
from spillway.spec.defaults import nothing
from spillway.spec.errors import DamageError, DiskError, UsageError, required
from spillway.spec.sizes import PAGE, align
from spillway.store.checks import ExtentChecks
from spillway.store.disk import Geometry, check_lengths
from spillway.store.homes import UnitHome
from spillway.store.manifest import (
    Manifest,
    UnitRecord,
    drop_manifests,
    load_manifests,
    reserve_manifests,
    save_manifest,
)
from spillway.store.placed import PlacedStore
from spillway.store.snapshot import Snapshot, num_resting_bytes

_WINDOW_BYTES = 64 << 20


@dataclass(slots=True)
class SavedPoints:
    """Commits the state of training to the manifests of a store, and restores it.

    Where every trained unit rests on disk each step is a saved point and costs nothing but a sync. Where states rest in
    host memory a saved point is written when `save` is called. Where steps are made in place so is it, and it lasts
    until the next step overwrites what it names.
    """

    directory: Path | None
    units: tuple[Unit, ...]
    device: torch.device  # whose random numbers are saved, besides those of the CPU
    keep_last: int = 1
    found: tuple[Manifest, ...] = ()  # the newest first
    run: dict[str, str] = field(default_factory=dict)  # what the training loop wants back, as JSON texts
    saved_step: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)  # written to each path to bring the store there
    new_names: dict[str, str] = field(default_factory=dict)  # of store paths that were called something else
    noted: "_Point | None" = None
    pending: "_Pending | None" = None
    before: "_Surroundings | None" = None  # of the first forward of the step under way
    at_step: Callable[[], dict[str, str]] = dict  # what is only known when a step is over; joins `run`
    at_commit: Callable[[], dict[str, str]] = dict  # what is only known when everything is written; joins `run`
    on_commit: Callable[[int], None] = lambda step: None
    buffers: Callable[[], dict[str, torch.Tensor]] = dict  # the persistent ones of the model, in use
    warnings: list[str] = field(default_factory=list)  # saved points that could not be used, and why
    has_set_random_state: bool = False

    @property
    def are_kept(self) -> bool:
        """Whether they stay: not without a store, nor where the drives have no room for two copies."""
        return self.directory is not None and self.keep_last > 0

    def can_save(self, store: PlacedStore) -> bool:
        """Whether there is a place on disk for everything that a saved point names."""
        return self.directory is not None and all(home.extents for home in store.homes.units)

    @property
    def step(self) -> int:
        """Optimizer steps behind the saved point that is gone on from."""
        return self.found[0].step if self.found else 0

    @property
    def found_run(self) -> dict[str, str]:
        """What the training loop had saved with it."""
        return self.found[0].run if self.found else {}

    def under_new_names(self, by_path: dict[str, int]) -> dict[str, int]:
        """Counts by store path, as the paths are called now."""
        found: Counter[str] = Counter()
        for path, count in by_path.items():
            found[self.new_names.get(path, path)] += count
        return dict(found)

    def find(self, resume: bool) -> tuple[Manifest, ...]:
        """The saved points to go on from. Raises UsageError where one would be overwritten, DiskError where they are
        of another model or none can be read."""
        good, bad = load_manifests(self.directory) if self.directory is not None else ([], [])
        if self.directory is None or not (good or bad):
            return ()
        if not resume:
            raise UsageError(
                f"{self.directory} holds {f'step {good[0].step} of ' if good else ''}an earlier run: resume it, or "
                f"choose another store"
            )
        if not good:
            raise DiskError(bad[0])
        own = usable(self.directory, self.units)
        if not own.points:
            raise DiskError(
                f"{self.directory} holds a run of another model, with another optimizer (its kind, moments or master "
                f"bits) or with other parameters frozen: choose another store, or give those again"
            )
        if not (self.keep_last or own.points[0].in_place):
            raise UsageError(
                f"{self.directory} holds step {own.points[0].step}, and a run that keeps no saved points (a limit of "
                f"0) would lose it: keep one, or start another run from an export of this one"
            )
        self.warnings += own.problems
        self._use(own.points)  # more than are kept, perhaps: until one of them is seen to be whole
        return self.found

    def first_whole(self, progress: Callable[[int], None]) -> Manifest:
        """The newest saved point whose every byte is as it was written. `progress` is called with bytes read. Raises
        DiskError where none is."""
        while True:
            manifest = self.found[0]
            try:
                self.check(manifest, progress)
                return manifest
            except DamageError as error:
                self._step_over(error)

    def check(self, manifest: Manifest, progress: Callable[[int], None]) -> None:
        """Read a saved point. `progress` is called with bytes read. Raises DamageError where it is not as written."""
        with SavedPoint(manifest, self.units) as point:
            point.verify(progress)

    def begin(self, store: PlacedStore) -> None:
        """The weights are at rest for the first time: no manifest names them yet, but no step may overwrite them
        before one does. Raises DiskError where there is no room for one."""
        for home in store.homes.units:
            home.saved = (home.current,) if home.extents and self.keep_last else ()
        if self.directory is not None and self.can_save(store):
            first = self._manifest(store, self._describe(0), _current(store))
            reserve_manifests(self.directory, first, self._num_kept)
            self.on_commit(0)  # what notes the step has its room, too

    def begin_step(self) -> None:
        """The first forward of a step begins: what it and those after it draw and change is not of the step before."""
        if self.directory is not None:
            self.before = self._surroundings()

    def after_step(self, store: PlacedStore, step: int) -> None:
        """Commit, where every step is a saved point; finish the one that was written during this step."""
        self.before = None
        if self.directory is not None and self.every_step(store):
            self._commit(store, self._describe(step), _current(store))
        else:
            self.settle(store)

    def note_step(self, store: PlacedStore, step: int) -> None:
        """The step is over but for its updates, which belong to the next forward. Finish the point that was written
        during it."""
        self.before = None
        self.settle(store)
        if self.directory is not None and self.every_step(store):
            self.noted = self._describe(step)

    def at_rest(self, store: PlacedStore) -> None:
        """The updates of the step that was noted last are at rest: commit it."""
        point, self.noted = self.noted, None
        if point is not None:
            self._commit(store, point, _current(store))

    def save(self, store: PlacedStore, step: int, progress: Callable[[int], None] = nothing) -> None:
        """Make the end of this step a saved point, also where states rest in memory. `progress` is called with bytes
        written."""
        self.save_behind(store, step, progress)
        self.settle(store)

    def num_unwritten_bytes(self, store: PlacedStore, step: int) -> int:
        """What `save` would write of this step."""
        return num_resting_bytes(store.homes.units) if self._is_new(store, step) else 0

    def _is_new(self, store: PlacedStore, step: int) -> bool:
        return self.can_save(store) and step != self.saved_step

    def save_behind(self, store: PlacedStore, step: int, progress: Callable[[int], None] = nothing) -> None:
        """As `save`, but written while the next step runs; committed by that step's end, or by `settle`."""
        self.settle(store)
        if not self._is_new(store, step):
            return
        homes = store.homes
        try:
            places = homes.place_snapshot()
        except BaseException:
            homes.forget_written()
            raise
        try:
            staging = store.staging(_WINDOW_BYTES, "writing a saved point")
            self.before_overwrite(store)
            snapshot = Snapshot(homes.units, places, homes.need_disk(), staging, progress)
        except BaseException:
            homes.drop_snapshot(places)
            raise
        homes.before_change = snapshot.before_change
        self.pending = _Pending(snapshot, places, self._describe(step), _current(store))

    def settle(self, store: PlacedStore) -> None:
        """Return when a saved point that is being written in the background is committed. Raises DiskError where it
        could not be written; the one before it is intact."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.snapshot.wait()
            self._commit(store, pending.point, pending.states)
        except BaseException:
            pending.snapshot.stop()
            if self.saved_step != pending.point.step:
                store.homes.drop_snapshot(pending.places)
            raise
        finally:
            store.homes.before_change = lambda unit: None

    def stop(self) -> None:
        """Give up a saved point that is being written in the background; afterwards nothing is."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.snapshot.stop()

    def before_overwrite(self, store: PlacedStore) -> None:
        """Where steps are made in place: nothing names what is on disk any more, durably, when this returns."""
        if self.keep_last or not self.found:
            return
        self.on_commit(0)
        drop_manifests(required(self.directory, "a saved point lies in a directory"), set())
        self.found, self.saved_step = (), 0
        for home in store.homes.units:
            home.saved = ()

    def every_step(self, store: PlacedStore) -> bool:
        """Whether each step is a saved point: nothing that training changes rests in memory only, or is overwritten."""
        if not self.are_kept:
            return False
        trained = [home for home in store.homes.units if home.layout.num_trainable]
        return all(home.where.states == "disk" for home in trained)

    def restore(self, store: PlacedStore, progress: Callable[[int], None]) -> None:
        """Bring the store to the newest saved point whose every byte is as it was written: which extents count, and
        what rests in memory. `progress` is called with bytes read. Raises DiskError where none is whole."""
        while True:
            manifest = self.found[0]
            try:
                for index in range(len(self.units)):
                    _restore_unit(store, manifest, index, progress)
                break
            except DamageError as error:
                self._step_over(error)
        self.found = self.found[: self._num_kept]
        self.on_commit(self.saved_step)  # an older one, where the newest was damaged: said before that one goes
        if self.directory is not None:
            # Those that will not be kept: from now on their extents are written to.
            drop_manifests(self.directory, {point.step for point in self.found})
            reserve_manifests(self.directory, self.found[0], self._num_kept)
        for index, home in enumerate(store.homes.units):
            home.saved = tuple(_extent_of(home, point.units[index]) for point in self.found)
            _copy_frozen(store, index)
            for point, extent in zip(self.found[1:], home.saved[1:], strict=True):
                home.checks[extent] = ExtentChecks.from_text(home.layout, point.units[index].checks)
        if not self.has_set_random_state:
            self.set_random_state()
        buffers = self.buffers()
        for name, text in self.found[0].buffers.items():
            buffer = buffers[name]
            buffer.copy_(from_text(text, buffer.dtype, buffer.shape))

    def set_random_state(self) -> None:
        """Random numbers go on from those of the saved point. `restore` does so by itself; a training loop that draws
        some before, to choose its data, does it earlier."""
        generators.go_on_from(self.found[0].rng, self.device)
        self.has_set_random_state = True

    def step_over_short(self, geometry: Geometry) -> None:
        """Go on from an older saved point where the files end before the newest one does. Raises DamageError where none
        is whole."""
        while True:
            try:
                check_lengths(geometry, max(unit.offset + unit.num_bytes for unit in self.found[0].units))
                return
            except DamageError as error:
                self._step_over(error)

    def _step_over(self, error: DamageError) -> None:
        if len(self.found) == 1:
            raise error
        self.warnings.append(f"step {self.found[0].step} is not used: {error}")
        self._use(self.found[1:])

    def _use(self, found: tuple[Manifest, ...]) -> None:
        self.found = found
        self.run = dict(found[0].run)
        self.saved_step = found[0].step

    @property
    def _num_kept(self) -> int:
        """One where steps are made in place, for as long as it lasts."""
        return max(self.keep_last, 1)

    def _describe(self, step: int) -> "_Point":
        """What the state at the end of this step is, apart from what the extents hold."""
        return _Point(step, self.before or self._surroundings(), {**self.run, **self.at_step()})

    def _surroundings(self) -> "_Surroundings":
        return _Surroundings(
            generators.states(self.device), {name: to_text(tensor) for name, tensor in self.buffers().items()}
        )

    def _manifest(self, store: PlacedStore, point: "_Point", states: tuple["_State", ...]) -> Manifest:
        units = tuple(
            UnitRecord(
                unit.name,
                home.extents[held.extent].offset,
                home.layout.extent_bytes,
                home.checks[held.extent].to_text(),
                held.num_updates,
            )
            for unit, home, held in zip(self.units, store.homes.units, states, strict=True)
        )
        geometry = store.homes.need_disk().geometry
        return Manifest(
            point.step,
            units,
            geometry,
            fingerprint(self.units),
            point.around.rng,
            {**point.run, **self.at_commit()},
            point.around.buffers,
            in_place=not self.keep_last,
        )

    def _commit(self, store: PlacedStore, point: "_Point", states: tuple["_State", ...]) -> None:
        directory = required(self.directory, "a saved point lies in a directory")
        manifest = self._manifest(store, point, states)
        save_manifest(directory, manifest, self._num_kept)
        self.found = (manifest, *self.found)[: self._num_kept]
        for home, held in zip(store.homes.units, states, strict=True):
            home.saved = (held.extent, *home.saved)[: self._num_kept]
        self.saved_step = point.step
        self.on_commit(point.step)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """States of generators and persistent buffers, as text: what forwards change."""

    rng: dict[str, str]
    buffers: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Point:
    """A step about to be committed: what goes on from there besides what lies in the extents."""

    step: int
    around: _Surroundings
    run: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A saved point that is being written."""

    snapshot: Snapshot
    places: dict[int, int]
    point: _Point
    states: tuple["_State", ...]


@dataclass(frozen=True, slots=True)
class _State:
    """Of a unit at a point: the extent that holds it, and the updates behind it."""

    extent: int
    num_updates: int


def _current(store: PlacedStore) -> tuple[_State, ...]:
    return tuple(_State(home.current, home.num_updates) for home in store.homes.units)


def to_text(tensor: torch.Tensor) -> str:
    """Base 64 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode() if flat.numel() else ""


def from_text(text: str, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """What `to_text` gave."""
    content = bytearray(base64.b64decode(text))
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _restore_unit(store: PlacedStore, manifest: Manifest, index: int, progress: Callable[[int], None]) -> None:
    """Read the unit's extent once: into memory what rests there, and through the checksums all of it."""
    home, record = store.homes.units[index], manifest.units[index]
    home.current, home.num_updates = _extent_of(home, record), record.num_updates
    found = ExtentChecks(home.layout)
    staging = store.staging(_WINDOW_BYTES, "resuming")
    step = staging.numel() // PAGE * PAGE
    for part in home.layout.components:
        resting = home.weight if part.name == "weight" else (home.state or {}).get(part.name)
        on_device = home.device_weight if part.name == "weight" else None
        for start in range(0, part.num_bytes, step):
            size = min(step, part.num_bytes - start)
            content = store.homes.read_extent(index, part, start, staging[:size])
            found.feed(part.offset + start, content)
            for target in (resting, on_device):
                if target is not None:
                    target[start : start + size].copy_(content)
            progress(size)
    expected = expected_checks(manifest, index, home.layout)
    compare(manifest, record, expected, found, store.homes.need_disk())
    home.checks[home.current] = found


def _copy_frozen(store: PlacedStore, index: int) -> None:
    """Frozen parameters are written once: extents that no saved point names get theirs now."""
    home = store.homes.units[index]
    part = home.layout.component("weight")
    others = [extent for extent in range(len(home.extents)) if extent not in home.saved]
    if part is None or not others:
        return
    for extent in others:
        home.checks[extent].copy_from(home.checks[home.current])
    trained = align(part.bytes_of(home.layout.num_trainable), PAGE)
    staging = store.staging(_WINDOW_BYTES, "resuming")
    step = staging.numel() // PAGE * PAGE
    for start in range(trained, part.num_bytes, step):
        content = store.homes.read_extent(index, part, start, staging[: min(step, part.num_bytes - start)])
        for extent in others:
            store.homes.write_extent(index, extent, part, start, content)


def _extent_of(home: UnitHome, record: UnitRecord) -> int:
    return [extent.offset for extent in home.extents].index(record.offset)
