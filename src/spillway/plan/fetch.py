"""The window: when each unit is fetched to the device, and how long it stays."""

from collections.abc import Sequence
from dataclasses import dataclass

from spillway.plan.build import Builder
from spillway.plan.pools import SlabNames
from spillway.plan.updates import Updates
from spillway.spec.model import ModelProfile
from spillway.spec.plan import HOME, Placement


@dataclass(frozen=True, slots=True)
class Use:
    """A forward or backward on the compute lane: what the window has to serve."""

    call: int
    unit: int
    backward: bool


@dataclass(slots=True)
class _Load:
    """A residency of a unit in a slot: fetched once, used until `last`."""

    unit: int
    number: int
    last: int
    slot: str = ""
    read: int | None = None
    upload: int | None = None


class Fetches:
    """Writes READ and UPLOAD of weights into a list, as early as there is room."""

    def __init__(
        self,
        build: Builder,
        model: ModelProfile,
        placement: Placement,
        names: SlabNames,
        updates: Updates,
        uses: Sequence[Use],
    ) -> None:
        self._build = build
        self._model = model
        self._plan = placement
        self._names = names
        self._updates = updates
        self._uses = uses
        self._loads, self._load_of_use = self._list_loads()
        self._next_read = 0
        self._next_upload = 0

    def advance(self) -> bool:
        """Emit one more fetch, if there is room for one."""
        return self._try_read() or self._try_upload()

    def is_there(self, position: int) -> bool:
        """Whether the unit of this use has been fetched."""
        load = self._load_of_use.get(position)
        return load is None or load.upload is not None

    def slot_of(self, position: int) -> tuple[str, int | None, tuple[str, ...]]:
        """Where the unit of this use lies, the upload to wait for, and the lease that ends with it."""
        load = self._load_of_use.get(position)
        if load is None:
            return HOME, None, ()
        return load.slot, load.upload, (load.slot,) if load.last == position else ()

    def _list_loads(self) -> tuple[list[_Load], dict[int, _Load]]:
        """Residencies in the order they are needed. After a use a unit stays in its slot exactly if it is among the
        next `window` units of its pool: the slots always hold what comes next, so the turn from forward to backward
        fetches nothing twice and capacity is never exceeded."""
        loads: list[_Load] = []
        of_use: dict[int, _Load] = {}
        current: dict[int, _Load] = {}
        for position, use in enumerate(self._uses):
            if self._plan.units[use.unit].weights == "device":
                continue
            load = current.get(use.unit)
            if load is None:
                load = _Load(use.unit, len(loads), position)
                loads.append(load)
                current[use.unit] = load
            load.last = position
            of_use[position] = load
            if not self._among_next(position + 1, use.unit):
                del current[use.unit]
        return loads, of_use

    def _among_next(self, position: int, unit: int) -> bool:
        pool = self._names.slot(unit)
        seen: set[int] = set()
        for use in self._uses[position:]:
            if use.unit == unit:
                return len(seen) < self._build.pools[pool].count
            if self._plan.units[use.unit].weights != "device" and self._names.slot(use.unit) == pool:
                seen.add(use.unit)
                if len(seen) >= self._build.pools[pool].count:
                    return False
        return False

    def _try_read(self) -> bool:
        while self._next_read < len(self._loads):
            load = self._loads[self._next_read]
            if self._plan.units[load.unit].weights != "disk":
                self._next_read += 1
                continue
            if self._updates.hands_over(load.unit):
                return self._try_hand_over(load)
            pool = self._names.weight(load.unit)
            if not self._build.has_room(pool):
                return False
            self._updates.catch_up(load.unit)
            size, renewed = self._model.units[load.unit].weight_bytes, self._updates.renewed(load.unit)
            lease, source = f"w{load.unit}.{load.number}", self._updates.newest
            load.read = self._build.add(
                "READ", "read", load.unit, "weight", size, [renewed], ((pool, lease),), (), source, lease
            )
            self._next_read += 1
            return True
        return False

    def _try_hand_over(self, load: _Load) -> bool:
        pool = self._names.slot(load.unit)
        if self._next_upload != self._next_read or not self._build.has_room(pool):
            return False
        load.slot = f"s{load.unit}.{load.number}"
        load.upload = self._updates.hand_over(load.unit, load.slot)
        self._next_read += 1
        self._next_upload += 1
        return True

    def _try_upload(self) -> bool:
        if self._next_upload >= len(self._loads):
            return False
        load = self._loads[self._next_upload]
        if self._updates.hands_over(load.unit):
            return False
        pool = self._names.slot(load.unit)
        from_disk = self._plan.units[load.unit].weights == "disk"
        if not self._build.has_room(pool) or (from_disk and load.read is None):
            return False
        self._updates.catch_up(load.unit)
        load.slot = f"s{load.unit}.{load.number}"
        staged = f"w{load.unit}.{load.number}"
        load.upload = self._build.add(
            "UPLOAD",
            "upload",
            load.unit,
            "weight",
            self._model.units[load.unit].weight_bytes,
            [load.read, None if from_disk else self._updates.renewed(load.unit)],
            ((pool, load.slot),),
            (staged,) if from_disk else (),
            staged if from_disk else HOME,
            load.slot,
        )
        self._next_upload += 1
        return True
