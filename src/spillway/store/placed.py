"""The store of one model, laid out as its plan says."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from spillway import native
from spillway.plan.memory import extents_of_units, grads_at_home
from spillway.plan.pools import SlabNames
from spillway.spec.defaults import nothing
from spillway.spec.errors import DiskError, UsageError, required
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan, Pool
from spillway.spec.sizes import PAGE, align
from spillway.store.arena import Arena, SlabPools
from spillway.store.checks import ExtentChecks
from spillway.store.disk import Extent, Geometry, StripedDisk
from spillway.store.homes import Homes, UnitHome
from spillway.store.layout import UnitLayout
from spillway.store.manifest import Manifest, manifest_files
from spillway.store.space import Space

Allocate = Callable[[int], torch.Tensor]
# Pins a host buffer and gives what unpins it again.
Pin = Callable[[torch.Tensor], Callable[[], None]]


class PlacedStore:
    """Host arena, device residents, extents on disk, and the slabs of the plan in force. Opened once, closed once."""

    def __init__(
        self,
        layouts: list[UnitLayout],
        geometry: Geometry | None,
        budget: Budget,
        on_device: Allocate,
        pin: Pin,
        saved: tuple[Manifest, ...],
    ) -> None:
        """`saved`: the points in the files that must stay whole, the newest first; without any the files start empty.
        `on_device`: allocates a device buffer."""
        self._layouts = layouts
        self._geometry = geometry
        self._budget = budget
        self._on_device = on_device
        self._pin = pin
        self._unpin_slabs: Callable[[], None] = nothing
        self._unpin_residents: Callable[[], None] = nothing
        self._saved = saved
        self._points = [] if geometry is None else _points(geometry)
        self._arena: Arena | None = None
        self._homes: Homes | None = None
        self._resident_end = 0
        self._fast_end = 0  # how far the slabs' part of the arena is touched, pinned and registered
        self._laid: tuple[Pool, ...] = ()
        self._act_base = 0
        self._buffers: dict[str, list[torch.Tensor]] = {}
        self._device_buffers: dict[str, list[torch.Tensor]] = {}
        self._names: SlabNames | None = None
        self._lone: Arena | None = None  # host memory for a unit that is wanted while no slabs are laid out
        self._lone_slot: torch.Tensor | None = None  # and device memory
        self.pools: SlabPools | None = None
        self.on_open: Callable[[PlacedStore, Plan], None] | None = None

    @property
    def homes(self) -> Homes:
        """The units at rest. Raises InvariantError before `open`."""
        return required(self._homes, "the store is not open")

    @property
    def arena(self) -> Arena:
        """Host memory of the store."""
        return required(self._arena, "the store is not open")

    def open(self, plan: Plan, profile: ModelProfile) -> None:
        """Take memory and disk space, then let `on_open` fill the homes."""
        ours = self._budget.host_bytes - self._budget.process_bytes
        self._arena = Arena(max(ours, 1))
        try:
            self._open(plan, profile)
        except BaseException:
            self.close()
            raise

    def _open(self, plan: Plan, profile: ModelProfile) -> None:
        self._homes = self._make_homes(plan, profile)
        self.act_extents(plan, profile)  # reserved before anything is trained
        self._resident_end = self.arena.mark()
        residents = self.arena.buffer[: self._resident_end]
        native.touch(residents.data_ptr(), residents.numel(), os.cpu_count() or 1)
        self._unpin_residents = self._pin(residents)
        if self.on_open is not None:
            self.on_open(self, plan)

    def lay_slabs(self, plan: Plan) -> None:
        """Cut the rest of the arena into the plan's pools; nothing may be leased, and no one may hold the slabs of the
        plan before: there is no room for both."""
        self._lone = self._lone_slot = None
        if plan.pools == self._laid:
            self.pools = SlabPools(plan.pools, self._buffers)
            return
        self._free_slabs()
        for pool in plan.pools:
            if pool.tier == "host":
                self._buffers[pool.name] = [
                    self.arena.allocate(pool.slab_bytes, f"the pool {pool.name}") for _ in range(pool.count)
                ]
        self._give_back_spare(plan)
        self._lay_slots(plan)
        self._make_fast(self.arena.mark())
        self.pools, self._laid = SlabPools(plan.pools, self._buffers), plan.pools

    def _lay_slots(self, plan: Plan) -> None:
        """Those of the plan before serve again where they are large enough, for a GPU stops while memory is taken and
        given back, and batches change their length from step to step. Larger ones only where there is room for them."""
        pools = {pool.name: pool for pool in plan.pools if pool.tier == "device"}
        kept = {name: found for name, found in self._device_buffers.items() if name in pools}
        kept = {name: found for name, found in kept.items() if _serve(found, pools[name])}
        more = sum(_num_bytes(found) - pools[name].num_bytes for name, found in kept.items())
        if more > self._room_on_device(plan):
            kept = {name: found for name, found in kept.items() if _num_bytes(found) == pools[name].num_bytes}
        self._device_buffers = kept  # the others go before more is taken
        for name, pool in pools.items():
            if name not in kept:
                kept[name] = [self._on_device(pool.slab_bytes) for _ in range(pool.count)]
            self._buffers[name] = [slot[: pool.slab_bytes] for slot in kept[name][: pool.count]]

    def _room_on_device(self, plan: Plan) -> int:
        """Bytes that the plan leaves; where the device is the CPU, of host memory, too."""
        room = self._budget.device_bytes - plan.peaks.device
        if any(slot.is_cuda for found in self._device_buffers.values() for slot in found):
            return room
        return min(room, self._budget.host_bytes - plan.peaks.host)

    def _give_back_spare(self, plan: Plan) -> None:
        """What plans before had slabs in and this one has not, where its other memory needs it: slots on the device,
        where that is host memory."""
        end = self._fast_end
        spare = end - self.arena.mark()
        if spare > 0 and plan.peaks.host + spare > self._budget.host_bytes:
            self._make_slow()
            self.arena.give_back(self.arena.mark(), end)

    def _make_fast(self, end: int) -> None:
        """Touch, pin and register the slabs' part of the arena up to here, where it is not yet: that takes a tenth of a
        second for a gigabyte, so another shape of batch must not cost it again."""
        if end <= self._fast_end:
            return
        self._make_slow()
        cut = self.arena.buffer[self._resident_end : end]
        native.touch(cut.data_ptr(), cut.numel(), os.cpu_count() or 1)
        self._unpin_slabs = self._pin(cut)
        self.homes.register(cut)
        self._fast_end = end

    def _make_slow(self) -> None:
        if self._homes is not None:
            self._homes.register(None)
        self._unpin_slabs()
        self._unpin_slabs, self._fast_end = nothing, 0

    def _free_slabs(self) -> None:
        self.pools, self._buffers, self._laid = None, {}, ()
        self.arena.reset_to(self._resident_end)

    def name_slabs(self, plan: Plan, profile: ModelProfile) -> None:
        """Remember which pool serves which unit, for `fetch`."""
        self._names = SlabNames(profile, plan.placement)

    def act_extents(self, plan: Plan, profile: ModelProfile) -> dict[int, Extent]:
        """Room on disk for the unit inputs that go there, per call."""
        extents: dict[int, Extent] = {}
        at = self._act_base
        names = SlabNames(profile, plan.placement)
        for index, kept in enumerate(plan.placement.acts):
            size = names.act_bytes(index)
            if kept.tier == "disk" and size:
                extents[index] = Extent(at, size)
                at += size
        if extents:
            self.homes.need_disk().reserve(at)
        return extents

    def staging(self, num_bytes: int, owner: str, least: int = 1 << 20) -> torch.Tensor:
        """Host memory for moving weights in and out while no step is under way; valid until the next step or staging.
        Shrinks to what is left, but not below `least`."""
        self._free_slabs()
        left = self.arena.num_bytes - self.arena.mark() - self.homes.bytes_beside_arena
        return self.arena.allocate(max(min(num_bytes, left), least), owner)

    def fetch(
        self,
        unit: int,
        beside_step: bool = False,
        ranges: Sequence[tuple[int, int]] | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The unit's weights on the device, by themselves; valid until the next fetch or step. `beside_step`: a step
        is under way, whose slabs are not to be touched. `ranges`: of bytes of the weights, (start, stop); all of them
        otherwise. `into`: what an earlier fetch of the unit gave."""
        home = self.homes.units[unit]
        if home.device_weight is not None:
            return home.device_weight
        size = home.layout.weight_bytes
        names = None if beside_step else self._names
        slots = [] if names is None else self._buffers.get(names.slot(unit), [])
        slot = into if into is not None else slots[0] if slots else self._by_itself()[:size]
        parts = [(0, size)] if ranges is None else list(ranges)
        if home.weight is not None:
            for start, stop in parts:
                slot[start:stop].copy_(home.weight[start:stop])
            return slot
        slabs = [] if names is None else self._buffers.get(names.weight(unit), [])
        if slabs:
            slab = slabs[0]
        else:
            if self._lone is None:
                with torch.inference_mode(False):  # it serves forwards with gradients, too, whoever asks first
                    self._lone = Arena(max(layout.weight_bytes for layout in self._layouts))
            slab = self._lone.buffer
        at, moves = home.extents[home.current].offset, []
        for start, stop in parts:
            first, last = start // PAGE * PAGE, align(stop, PAGE)
            moves.append((Extent(at + first, last - first), slab[first:last]))
        self.homes.need_disk().read_all(self.homes.own_engine, moves)
        for start, stop in parts:
            slot[start:stop].copy_(slab[start:stop])
        return slot

    def _by_itself(self) -> torch.Tensor:
        """Device memory for any unit; taken once, for a model may ask for units beside every step."""
        if self._lone_slot is None:
            with torch.inference_mode(False):
                self._lone_slot = self._on_device(max(layout.weight_bytes for layout in self._layouts))
        return self._lone_slot

    def close(self) -> None:
        """Give everything back."""
        self._make_slow()
        self._unpin_residents()
        self._unpin_residents = nothing
        self.pools, self._buffers, self._device_buffers = None, {}, {}
        self._lone = self._lone_slot = None
        if self._homes is not None:
            self._homes.close()
            self._homes = None
        self._arena = None

    def _make_homes(self, plan: Plan, profile: ModelProfile) -> Homes:
        disk = None
        if self._geometry is not None:
            disk = StripedDisk(self._geometry, keep=bool(self._saved), check=self._refuse_changed)
        try:
            if disk is not None:
                disk.drop_others()
            return self._lay_homes(plan, profile, disk)
        except BaseException:
            if disk is not None:
                disk.close()
            raise

    def _refuse_changed(self) -> None:
        """Raise UsageError where another run has saved to this store since it was looked at."""
        if self._geometry is not None and _points(self._geometry) != self._points:
            raise UsageError(
                f"another run has saved to {self._geometry.paths[0]} since this model was prepared: prepare it again, "
                f"or choose another store"
            )

    def _lay_homes(self, plan: Plan, profile: ModelProfile, disk: StripedDisk | None) -> Homes:
        kept = [[manifest.units[index] for manifest in self._saved] for index in range(len(self._layouts))]
        space = Space([Extent(record.offset, record.num_bytes) for records in kept for record in records])
        homes: list[UnitHome] = []
        fresh = not self._saved
        for index, layout in enumerate(self._layouts):
            extents = list(dict.fromkeys(Extent(record.offset, record.num_bytes) for record in kept[index]))
            copies = extents_of_units(plan.placement)[index] if disk else 0
            while len(extents) < copies:
                extents.append(space.allocate(layout.extent_bytes))
            homes.append(self._make_home(plan, profile, index, tuple(extents)))
            for checks in homes[-1].checks if fresh else ():
                checks.fill_zero()
        for home in homes:
            if home.where.grads == "disk" and home.layout.num_trainable:
                home.spill = space.allocate(home.layout.grad_bytes)
        self._act_base = space.end
        if disk is not None:
            disk.reserve(space.end)
        return Homes(homes, disk)

    def _make_home(self, plan: Plan, profile: ModelProfile, index: int, extents: tuple[Extent, ...]) -> UnitHome:
        layout, where = self._layouts[index], plan.placement.units[index]
        home = UnitHome(layout, where, extents=extents, checks=[ExtentChecks(layout) for _ in extents])
        owner = profile.units[index].name
        if where.weights == "device":
            home.device_weight = self._on_device(layout.weight_bytes)
        if where.has_host_weights:
            home.weight = self.arena.allocate(layout.weight_bytes, f"the weights of {owner}")
        if where.states == "host":
            home.state = {
                part.name: self.arena.allocate(part.num_bytes, f"the optimizer state of {owner}")
                for part in layout.components
                if part.name != "weight"
            }
        if layout.num_trainable and grads_at_home(plan.placement, index):
            home.grad = self.arena.allocate(layout.grad_bytes, f"the gradient of {owner}")
        if where.states == "device":
            home.weight = home.device_weight
            home.state = {
                part.name: self._on_device(part.num_bytes).zero_()
                for part in layout.components
                if part.name != "weight"
            }
        if layout.num_trainable and (index in profile.resident_units or where.states == "device"):
            home.device_grad = self._on_device(layout.grad_bytes)
        if where.weights == "disk" and not extents:
            raise DiskError(f"{owner} should rest on disk and there is no store path")
        return home


def _points(geometry: Geometry) -> list[Path]:
    """The files of saved points under the paths of a store."""
    return [file for path in geometry.paths for _, file in manifest_files(Path(path))]


def _serve(slots: list[torch.Tensor], pool: Pool) -> bool:
    return len(slots) >= pool.count and all(slot.numel() >= pool.slab_bytes for slot in slots)


def _num_bytes(slots: list[torch.Tensor]) -> int:
    return sum(slot.numel() for slot in slots)
