"""Where every unit rests between steps, in host memory, on the device and on disk, and how ranges of it move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from spillway.native import DiskEngine
from spillway.optim.update import StateRange
from spillway.spec.defaults import nothing
from spillway.spec.errors import DiskError, invariant, required
from spillway.spec.plan import UnitPlacement
from spillway.spec.sizes import PAGE, align
from spillway.store.checks import ExtentChecks
from spillway.store.disk import Extent, StripedDisk
from spillway.store.layout import Component, UnitLayout

_NOTHING: dict[int, int] = {}


@dataclass(slots=True)
class UnitHome:
    """The resting places of one unit. Buffers are uint8; None where that part rests elsewhere."""

    layout: UnitLayout
    where: UnitPlacement
    weight: torch.Tensor | None = None  # host, or the device where the states are there
    state: dict[str, torch.Tensor] | None = None  # host or device, by component
    grad: torch.Tensor | None = None  # host
    device_weight: torch.Tensor | None = None
    device_grad: torch.Tensor | None = None
    extents: tuple[Extent, ...] = ()
    spill: Extent | None = None  # of the gradient
    checks: list[ExtentChecks] = field(default_factory=list)  # per extent
    current: int = 0  # the extent that holds the last step
    written: int | None = None  # the extent this step writes
    saved: tuple[int, ...] = ()  # the extents that manifests name, the newest first
    has_grad: bool = False  # a gradient has been accumulated since the last update
    num_updates: int = 0  # steps so far that reached it, also where the last one's update is still due

    @property
    def in_place(self) -> bool:
        """Whether a step overwrites the one before it on disk."""
        return len(self.extents) == 1 and self.layout.num_trainable > 0

    def next_extent(self) -> int:
        """The extent to write next: neither the last step's nor a saved point's; where there is but one, that one."""
        if self.written is None:
            taken = set() if self.in_place else {self.current, *self.saved}
            self.written = next((index for index in range(len(self.extents)) if index not in taken), None)
            if self.written is None:
                raise DiskError("there is no room for another step: the one before could not be saved; save it first")
        return self.written


class SlabRange:
    """The parts of one subgroup that pass through a slab: which components, and where in slab and extent."""

    def __init__(self, home: UnitHome, start: int, stop: int) -> None:
        self._home = home
        self._start, self._stop = start, stop
        self._places: dict[str, tuple[int, int]] = {}  # component -> offset in the slab, bytes in whole pages
        at = 0
        for name in self._staged():
            size = align(self._bytes(name, stop - start), PAGE)
            self._places[name] = (at, size)
            at += size

    def _staged(self) -> list[str]:
        where = self._home.where
        names = []
        if where.updates_disk_weights:
            names.append("weight")
        if where.states == "disk":
            names += [part.name for part in self._home.layout.components if part.name != "weight"]
        if where.grads == "disk":
            names.append("grad")
        return names

    def _bytes(self, name: str, elements: int) -> int:
        part = self._home.layout.component(name)
        return self._home.layout.dtype.itemsize * elements if part is None else part.bytes_of(elements)

    def _extent(self, name: str, base: Extent) -> Extent:
        part = self._home.layout.component(name)
        offset = 0 if part is None else part.offset
        return Extent(base.offset + offset + self._bytes(name, self._start), self._places[name][1])

    @property
    def is_written(self) -> bool:
        """Whether an update writes anything: more than its gradient passed through the slab."""
        return any(name != "grad" for name in self._places)

    def reads(self, slab: torch.Tensor, newest: bool = False) -> list[tuple[Extent, torch.Tensor]]:
        """What to read from disk, and where to in the slab: as it was committed last, or, `newest`, written last."""
        home, moves = self._home, []
        written = home.written if newest else None  # a commit on another lane may make it the current one meanwhile
        index = home.current if written is None else written
        for name, (at, size) in self._places.items():
            base = home.spill if name == "grad" else home.extents[index]
            moves.append((self._extent(name, required(base, f"{name} has no place on disk")), slab[at : at + size]))
        return moves

    def weight_reads(self, slab: torch.Tensor) -> list[tuple[Extent, torch.Tensor]]:
        """Of `reads`, the weights."""
        if "weight" not in self._places:
            return []
        at, size = self._places["weight"]
        return [(self._extent("weight", self._home.extents[self._home.current]), slab[at : at + size])]

    def weight_in_slab(self, slab: torch.Tensor) -> torch.Tensor:
        """The bytes of the subgroup's weights where they pass through the slab."""
        at, _ = self._places["weight"]
        return slab[at : at + self._bytes("weight", self._stop - self._start)]

    def weight_in_slot(self, slot: torch.Tensor) -> torch.Tensor:
        """The bytes of the subgroup's weights in a slot that holds the whole unit's."""
        return slot[self._bytes("weight", self._start) : self._bytes("weight", self._stop)]

    def writes(self, slab: torch.Tensor) -> list[tuple[Extent, torch.Tensor]]:
        """What to write, to the extent of this step; weights that rest in host memory come from there."""
        home = self._home
        if not self.is_written:
            return []
        base = home.extents[home.next_extent()]
        moves = [
            (self._extent(name, base), slab[at : at + size])
            for name, (at, size) in self._places.items()
            if name != "grad"
        ]
        if "weight" not in self._places and home.weight is not None:
            begin = self._bytes("weight", self._start)
            length = align(self._bytes("weight", self._stop - self._start), PAGE)
            moves.append((Extent(base.offset + begin, length), home.weight[begin : begin + length]))
        return moves

    def check(self, slab: torch.Tensor, threads: int) -> None:
        """Take the checksums of what `writes` will write."""
        home = self._home
        if not self.is_written:
            return
        index = home.next_extent()
        for extent, content in self.writes(slab):
            home.checks[index].feed(extent.offset - home.extents[index].offset, content[: extent.num_bytes], threads)

    def arrays(self, slab: torch.Tensor | None, grad: torch.Tensor | None) -> StateRange:
        """The subgroup as typed ranges. `grad`: the unit's whole gradient where it is not in the slab."""
        home = self._home
        resting = {"weight": home.weight, "grad": grad, **(home.state or {})}

        def found(name: str, size: int) -> torch.Tensor:
            if name in self._places and slab is not None:
                at = self._places[name][0]
                return slab[at : at + size]
            whole = resting.get(name)
            begin = self._bytes(name, self._start)
            return required(whole, f"{name} is neither at rest in memory nor in the slab")[begin : begin + size]

        return self._typed(found)

    def blank(self) -> StateRange:
        """The sizes and types of `arrays`, without content."""
        return self._typed(lambda _, size: torch.empty(size, dtype=torch.uint8, device="meta"))

    def grad(self, source: torch.Tensor | None) -> torch.Tensor:
        """Of `arrays`, the gradient. `source`: the slab that it passes through or, where it does not, the unit's whole
        gradient."""
        size = self._bytes("grad", self._stop - self._start)
        at = self._places["grad"][0] if "grad" in self._places else self._bytes("grad", self._start)
        source = required(source, "the gradient is neither at rest in memory nor in the slab")
        return source[at : at + size].view(self._home.layout.dtype)

    def _typed(self, found: Callable[[str, int], torch.Tensor]) -> StateRange:
        layout = self._home.layout

        def part(name: str, kind: torch.dtype) -> torch.Tensor:
            return found(name, self._bytes(name, self._stop - self._start)).view(kind)

        def state(name: str) -> torch.Tensor | None:
            component = layout.component(name)
            return None if component is None else part(name, component.dtype)

        return StateRange(
            layout.state_format,
            self._start,
            part("weight", layout.dtype),
            state("master") if layout.dtype is torch.float16 else state("low"),
            state("m"),
            state("v"),
            state("scales"),
            part("grad", layout.dtype),
        )


class Homes:
    """All units at rest. One engine per direction, so that a read never queues behind writes."""

    def __init__(self, units: list[UnitHome], disk: StripedDisk | None) -> None:
        self.units = units
        self.disk = disk
        self.read_engine = DiskEngine()
        self.write_engine = DiskEngine()
        # A third one for the caller's thread: import, export and saved points do not disturb the lanes.
        self.own_engine = DiskEngine()
        # Called before a unit's state in memory changes; a saved point may still be written from it.
        self.before_change: Callable[[int], None] = nothing
        # Called before the only copy on disk of a unit is overwritten; a saved point may name it.
        self.before_overwrite: Callable[[], None] = nothing

    @property
    def bytes_beside_arena(self) -> int:
        """Host memory of what rests on the device, where that is the CPU."""
        found = 0
        for home in self.units:
            states = (home.state or {}).values() if home.where.states == "device" else ()
            parts = (home.device_weight, home.device_grad, *states)
            found += sum(part.numel() for part in parts if part is not None and part.device.type == "cpu")
        return found

    def need_disk(self) -> StripedDisk:
        """The disk. Raises InvariantError where the plan has none."""
        return required(self.disk, "this plan has no store on disk")

    def register(self, slabs: torch.Tensor | None) -> None:
        """Tell the lanes' engines which memory they will work on; None before it goes."""
        for engine in (self.read_engine, self.write_engine):
            if self.disk is None or slabs is None or not slabs.numel():
                engine.register((), 0, 0)
            else:
                engine.register(self.disk.files, slabs.data_ptr(), slabs.numel())

    def flip(self) -> None:
        """What this step has written becomes the current state."""
        for home in self.units:
            if home.written is not None:
                home.current, home.written = home.written, None

    @property
    def written(self) -> dict[int, int]:
        """The extents that were written and are not the state of their units yet."""
        return {index: home.written for index, home in enumerate(self.units) if home.written is not None}

    def forget_written(self, earlier: Mapping[int, int] = _NOTHING) -> None:
        """The step was given up: what it wrote is not the state of anything. `earlier`: what was written before it,
        which is still to become that."""
        for index, home in enumerate(self.units):
            home.written = earlier.get(index)

    def take_back(self) -> None:
        """As `forget_written`; weights that rest in host memory are read again from what is the state. Raises DiskError
        where they cannot be."""
        for home in self.units:
            if home.written is not None and home.weight is not None:
                extent = Extent(home.extents[home.current].offset, home.layout.weight_bytes)
                self.need_disk().read(self.own_engine, extent, home.weight)
        self.forget_written()

    def place_snapshot(self) -> dict[int, int]:
        """The extents that a saved point of now goes to, for the units whose newest state is in memory, in the order in
        which the next step changes them; from here on they are current. Raises DiskError where there is no room."""
        places: dict[int, int] = {}
        for index in self._order_of_change():
            home, where = self.units[index], self.units[index].where
            if not home.extents or not home.layout.num_trainable or where.states == "disk":
                continue
            if where.weights == "disk" and home.current in home.saved[:1]:
                continue  # no step since the last saved point
            # Weights on disk are already where this step wrote them; the states join them there.
            places[index] = home.current if where.weights == "disk" else home.next_extent()
        self.flip()
        return places

    def _order_of_change(self) -> list[int]:
        """Updates that belong to forward come in the order of units, the others in that of backward."""
        indices = range(len(self.units))
        return [i for i in indices if self.units[i].where.defers] + [
            i for i in reversed(indices) if not self.units[i].where.defers
        ]

    def drop_snapshot(self, places: dict[int, int]) -> None:
        """It was not written: what rests in memory has no extent of its own again."""
        for index in places:
            home = self.units[index]
            if home.where.weights != "disk" and home.saved:
                home.current = home.saved[0]

    def _write_checked(self, home: UnitHome, index: int, offset: int, content: torch.Tensor) -> None:
        home.checks[index].feed(offset, content)
        place = Extent(home.extents[index].offset + offset, content.numel())
        self.need_disk().write_all(self.own_engine, [(place, content)])

    def read_component(self, unit: int, name: str, start: int, stop: int, staging: torch.Tensor) -> torch.Tensor:
        """Bytes [start, stop) of one array of a unit, from wherever it rests; a view, valid until `staging` is used
        again. `staging`: host memory with room for the bytes and two pages."""
        home = self.units[unit]
        resting = home.weight if name == "weight" else (home.state or {}).get(name)
        if resting is not None:
            return resting[start:stop].cpu()
        part = home.layout.component(name)
        invariant(bool(home.extents), f"unit {unit} has no {name} at rest")
        offset = required(part, f"a unit has no {name}").offset
        begin, end = start // PAGE * PAGE, align(stop, PAGE)
        place = Extent(home.extents[home.current].offset + offset + begin, end - begin)
        self.need_disk().read(self.own_engine, place, staging[: end - begin])
        return staging[start - begin : stop - begin]

    def read_extent(self, unit: int, part: Component, start: int, content: torch.Tensor) -> torch.Tensor:
        """Fill whole pages from the current extent on disk, whatever rests in memory."""
        place = Extent(self.units[unit].extents[self.units[unit].current].offset + part.offset + start, content.numel())
        self.need_disk().read(self.own_engine, place, content)
        return content

    def write_extent(self, unit: int, index: int, part: Component, start: int, content: torch.Tensor) -> None:
        """Write whole pages of one array into one of the unit's extents, leaving memory and checksums alone."""
        place = Extent(self.units[unit].extents[index].offset + part.offset + start, content.numel())
        self.need_disk().write_all(self.own_engine, [(place, content)])

    def write_component(self, unit: int, name: str, start: int, content: torch.Tensor) -> None:
        """Put whole pages of one array to rest, in memory and into every copy on disk."""
        home = self.units[unit]
        resting = home.weight if name == "weight" else (home.state or {}).get(name)
        if resting is not None:
            resting[start : start + content.numel()].copy_(content)
        if name == "weight" and home.device_weight is not None:
            home.device_weight[start : start + content.numel()].copy_(content)
        part = home.layout.component(name)
        if part is None or not home.extents:
            return
        for index in range(len(home.extents)):
            self._write_checked(home, index, part.offset + start, content)

    def close(self) -> None:
        """Give back engines and files."""
        for engine in (self.read_engine, self.write_engine, self.own_engine):
            engine.close()
        if self.disk is not None:
            self.disk.close()
