"""Saved points: what is committed, when, and how a run goes on from it."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from spillway.model.units import Unit
from spillway.spec.errors import DiskError, UsageError
from spillway.store.manifest import Manifest, UnitRecord, load_manifest, save_manifest
from spillway.store.placed import PlacedStore


class SavedPoints:
    """Commits the state of training to the manifest of a store, and restores it.

    Where every trained unit rests on disk each step is a saved point and costs nothing but a sync. Where states rest in
    host memory a saved point is written when `save` is called.
    """

    def __init__(self, directory: Path | None, units: tuple[Unit, ...], num_paths: int) -> None:
        self._directory = directory
        self._units = units
        self._num_paths = num_paths
        self._found: Manifest | None = None
        self.run: dict[str, str] = {}  # what the training loop wants back, as JSON texts
        self.saved_step = 0

    @property
    def step(self) -> int:
        """Optimizer steps behind the saved point that was found."""
        return 0 if self._found is None else self._found.step

    @property
    def found_run(self) -> dict[str, str]:
        """What the training loop had saved with it."""
        return {} if self._found is None else self._found.run

    def find(self, resume: bool) -> Manifest | None:
        """The saved point to go on from. Raises UsageError where one would be overwritten, DiskError where it is of
        another model."""
        found = load_manifest(self._directory) if self._directory is not None else None
        if found is None:
            return None
        if not resume:
            raise UsageError(
                f"{self._directory} holds step {found.step} of an earlier run: resume it, or choose another store"
            )
        if found.model_fingerprint != self._fingerprint():
            raise DiskError(f"{self._directory} holds a run of another model: choose another store, or that model")
        if found.num_paths != self._num_paths:
            raise DiskError(
                f"{self._directory} was striped over {found.num_paths} store path(s) and {self._num_paths} are given: "
                f"give the same --store paths in the same order"
            )
        self._found = found
        self.run = dict(found.run)
        self.saved_step = found.step
        return found

    def begin(self, store: PlacedStore) -> None:
        """The weights are at rest for the first time: the start of training is a saved point too."""
        for home in store.homes.units:
            home.committed = home.current if home.extents else None

    def after_step(self, store: PlacedStore, step: int) -> None:
        """Commit, where every step is a saved point."""
        if self._directory is not None and self.every_step(store):
            self._commit(store, step)

    def save(self, store: PlacedStore, step: int) -> None:
        """Make the end of this step a saved point, also where states rest in host memory."""
        if self._directory is None or step == self.saved_step:
            return
        store.homes.snapshot(store.staging(64 << 20, "writing a saved point"))
        store.homes.need_disk().sync()
        store.homes.flip()
        self._commit(store, step)

    def every_step(self, store: PlacedStore) -> bool:
        """Whether nothing that training changes rests in memory only."""
        trained = [home for home in store.homes.units if home.layout.num_trainable]
        return all(home.where.states == "disk" for home in trained)

    def restore(self, store: PlacedStore) -> None:
        """Bring the store to the saved point: which extents count, and what rests in memory."""
        found = self._found
        if found is None:
            raise AssertionError("there is no saved point to restore")
        homes = store.homes
        for index, (home, record) in enumerate(zip(homes.units, found.units, strict=True)):
            offsets = [extent.offset for extent in home.extents]
            if record.offset not in offsets or record.num_bytes != home.layout.extent_bytes:
                raise DiskError(
                    f"{self._directory} was laid out for another placement of {self._units[index].name}: resume with "
                    f"the memory budgets and options of the first run"
                )
            home.current = home.committed = offsets.index(record.offset)
            for part in home.layout.components:
                resting = home.weight if part.name == "weight" else (home.state or {}).get(part.name)
                on_device = home.device_weight if part.name == "weight" else None
                if resting is None and on_device is None:
                    continue
                staging = store.staging(64 << 20, "resuming")
                step = staging.numel() // 4096 * 4096
                for start in range(0, part.num_bytes, step):
                    size = min(step, part.num_bytes - start)
                    content = homes.read_extent(index, part, start, staging[:size])
                    for target in (resting, on_device):
                        if target is not None:
                            target[start : start + size].copy_(content)
        for device, state in found.rng.items():
            _set_rng(device, torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))

    def _commit(self, store: PlacedStore, step: int) -> None:
        if self._directory is None:
            return
        units = tuple(
            UnitRecord(unit.name, home.extents[home.current].offset, home.layout.extent_bytes)
            for unit, home in zip(self._units, store.homes.units, strict=True)
        )
        manifest = Manifest(step, units, self._num_paths, self._fingerprint(), _rng(), dict(self.run))
        save_manifest(self._directory, manifest)
        for home in store.homes.units:
            home.committed = home.current
        self.saved_step = step
        self._found = replace(manifest)

    def _fingerprint(self) -> str:
        described = [
            (unit.name, [(p.name, p.shape, str(p.dtype), p.trainable) for p in unit.layout.places])
            for unit in self._units
        ]
        return hashlib.sha256(repr(described).encode()).hexdigest()


def _rng() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: bytes(state.tolist()).hex() for device, state in states.items()}


def _set_rng(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state)
