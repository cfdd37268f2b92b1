"""What each kind of operation does on its lane."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from spillway.optim.clip import Clipping
from spillway.optim.update import Hyper, StateRange, laid_in, sum_squares, update_range
from spillway.runtime.device import Device
from spillway.runtime.held import Outgoing
from spillway.spec.defaults import nothing
from spillway.spec.errors import InvariantError, NonFinite, required
from spillway.spec.plan import HOME, WRITTEN, Op
from spillway.store.arena import SlabPools
from spillway.store.disk import Extent
from spillway.store.homes import Homes, SlabRange, UnitHome


@dataclass(slots=True)
class Due:
    """What an optimizer step does to the units, besides their gradients: known when its norm is.

    `sweeping`: units are among them that are otherwise updated within their step. `written`: the extents of those that
    were, which become their units' state when the others are updated, too.
    """

    hypers: list[Hyper] = field(default_factory=list)  # per parameter group
    numbers: tuple[int, ...] = ()  # per unit: the how manieth update of it this is, from 1
    clipping: Clipping = field(default_factory=Clipping)
    loss_scale: float = 1.0  # the gradients are so many times too large
    scale: float = 1.0  # that clips all of them
    unit_scales: dict[int, float] = field(default_factory=dict)  # and each by itself
    units: set[int] = field(default_factory=set)  # those with a gradient; the others are left alone, as in PyTorch
    sweeping: bool = False
    written: dict[int, int] = field(default_factory=dict)

    def factor(self, unit: int) -> float:
        """What a unit's gradient is multiplied by."""
        return self.scale * self.unit_scales.get(unit, 1.0) / self.loss_scale


@dataclass(slots=True)
class StepState:
    """What the operations of one list share besides slabs."""

    own: Due = field(default_factory=Due)  # of the step that this forward and backward belong to
    late: Due | None = None  # of the step before, whose updates belong to this forward
    applied_scale: float | None = None  # of the gradients, in this step's own updates
    may_take_back: bool = False  # its own updates can be taken back
    squares: dict[int, float] = field(default_factory=dict)  # per unit: sum of squares of its gradient as it landed
    non_finite: int | None = None  # a unit whose gradient is infinite or not a number
    fresh: set[int] = field(default_factory=set)  # units whose gradient slot this backward has filled
    acts: dict[int, Outgoing] = field(default_factory=dict)  # on their way out, per call
    at_rest: bool = False  # every update of `late` is
    in_place: bool = False  # an update has changed weights or states of which there is no other copy
    late_in_place: bool = False  # one of the step before has
    act_extents: dict[int, Extent] = field(default_factory=dict)

    @property
    def is_half_done(self) -> bool:
        """Whether, given up here, it leaves units of two steps behind, or loses updates that count as done: those of
        the step before can be made again as long as their gradients are there."""
        can_repeat = not self.late_in_place and not self.fresh
        return self.in_place or (self.late is not None and not self.at_rest and not can_repeat)

    @property
    def guessed_wrong(self) -> bool:
        """Whether units were updated with gradients of another scale than the norm then asked for."""
        return self.applied_scale is not None and self.applied_scale != self.own.scale

    def grad_norm(self) -> float:
        """The global norm of the gradients before clipping."""
        return math.sqrt(sum(self.squares[unit] for unit in sorted(self.squares))) / self.own.loss_scale


class LaneWorker:
    """Carries out operations; the executor says when. `segments`: per unit, (start, stop, parameter group) ranges of
    its trainable elements. `accumulates`: gradients of several backwards are summed."""

    def __init__(
        self,
        device: Device,
        homes: Homes,
        segments: list[list[tuple[int, int, int]]],
        names: list[str],
        threads: int,
        accumulates: bool,
    ) -> None:
        self._device = device
        self._homes = homes
        self._segments = segments
        self._names = names
        self._threads = threads
        self._accumulates = accumulates
        self.pools: SlabPools | None = None
        self.step = StepState()
        self.on_rest: Callable[[], None] = nothing  # called when the late updates of a step are at rest

    def __call__(self, op: Op) -> None:
        """Run one operation of a thread lane."""
        if op.unit < 0:
            self._run_for_all(op)
            return
        home = self._homes.units[op.unit]
        match op.kind, op.group:
            case "READ", "weight":
                self._read_weight(op, home)
            case "READ", "grad":
                self._read_grad(op, home)
            case "READ", "act":
                self._read_act(op)
            case "READ", "state":
                self._read_state(op, home)
            case "UPLOAD", "weight":
                self._upload_weight(op, home)
            case "UPLOAD", "act":
                self._upload_act(op)
            case "UPLOAD", "state":
                self._upload_state(op, home)
            case "UPLOAD", "grad":
                self._upload_grad(op, home)
            case "DOWNLOAD", "act":
                self._download_act(op)
            case "DOWNLOAD", "grad":
                self._download_grad(op, home)
            case "DOWNLOAD", "state":
                self._download_state(op, home)
            case "WRITE", "act":
                self._write_act(op)
            case "WRITE", "grad":
                self._write_grad(op, home)
            case "WRITE", "state":
                self._write_state(op, home)
            case "ACCUMULATE", _:
                self._accumulate(op, home)
            case "NORM", _:
                self._norm(op, home)
            case "UPDATE", _:
                self._update(op, home)
            case _:
                raise InvariantError(f"no lane carries out {op.kind} of {op.group}")

    def _run_for_all(self, op: Op) -> None:
        match op.kind:
            case "NORM":
                self._global_norm()
            case "COMMIT":
                self._commit(op)
            case _:
                raise InvariantError(f"no lane carries out {op.kind} of no unit")

    def _skips(self, op: Op) -> bool:
        """Whether a late operation has nothing to do: no step went before, or the unit was updated in it."""
        return op.late and (self.step.late is None or op.unit not in self.step.late.units)

    def _buffer(self, lease: str) -> torch.Tensor:
        return required(self.pools, "no step is under way").buffer(lease)

    # Weights #

    def _read_weight(self, op: Op, home: UnitHome) -> None:
        if self._skips(op):
            return
        written = home.written  # of which a commit on another lane may make the current one meanwhile
        index = home.current if op.source == HOME or written is None else written
        extent = Extent(home.extents[index].offset, home.layout.weight_bytes)
        self._homes.need_disk().read(self._homes.read_engine, extent, self._buffer(op.target))

    def _upload_weight(self, op: Op, home: UnitHome) -> None:
        source = home.weight if op.source == HOME else self._buffer(op.source)
        target = home.device_weight if op.target == HOME else self._buffer(op.target)
        if op.stop and source is not None and target is not None:  # straight from an update
            part = SlabRange(home, op.start, op.stop)
            self._device.copy("upload", [(part.weight_in_slot(target), part.weight_in_slab(source))])
            return
        if self._skips(op):
            return
        source, target = (required(part, f"unit {op.unit} has no weights to upload") for part in (source, target))
        size = home.layout.weight_bytes
        if op.target == HOME and not op.late:
            self.step.in_place = True
        self._device.copy("upload", [(target[:size], source[:size])])

    # Activations #

    def _download_act(self, op: Op) -> None:
        buffer, moves = self._buffer(op.target), []
        outgoing = self.step.acts.pop(op.call, None)
        if outgoing is None:  # a forward that was given up is run out
            return
        for at, tensor in outgoing.moves:
            size = tensor.numel() * tensor.element_size()
            moves.append((buffer[at : at + size].view(tensor.dtype).view(tensor.shape), tensor))
        self._device.copy("download", moves)
        outgoing.refuse_changed()

    def _write_act(self, op: Op) -> None:
        extent = self.step.act_extents[op.call]
        move = (extent, self._buffer(op.source)[: extent.num_bytes])
        self._homes.need_disk().write_all(self._homes.write_engine, [move])

    def _read_act(self, op: Op) -> None:
        self._homes.need_disk().read(self._homes.read_engine, self.step.act_extents[op.call], self._buffer(op.target))

    def _upload_act(self, op: Op) -> None:
        size = int(op.amount)
        self._device.copy("upload", [(self._buffer(op.target)[:size], self._buffer(op.source)[:size])])

    # Gradients #

    def _download_grad(self, op: Op, home: UnitHome) -> None:
        if op.unit not in self.step.fresh:
            return  # autograd did not reach this unit
        source = home.device_grad if op.source == HOME else self._buffer(op.source)
        target = home.grad if op.target == HOME else self._buffer(op.target)
        source, target = (required(part, f"unit {op.unit} has no gradient to download") for part in (source, target))
        size = home.layout.grad_bytes
        self._device.copy("download", [(target[:size], source[:size])])
        if not self._accumulates:
            home.has_grad = True

    def _grad_at(self, op: Op, home: UnitHome) -> torch.Tensor | None:
        """The gradient an operation works on: its lease, or where the unit keeps it."""
        if op.source != HOME:
            return self._buffer(op.source)
        return home.device_grad if home.where.states == "device" else home.grad

    def _accumulate(self, op: Op, home: UnitHome) -> None:
        if op.unit not in self.step.fresh:
            return
        at_home = home.device_grad if op.lane == "device" else home.grad
        total = at_home if op.target == HOME else self._buffer(op.target)
        total = required(total, f"unit {op.unit} has no place for the sum of its gradients")
        size, dtype = home.layout.grad_bytes, home.layout.dtype
        new, old = self._buffer(op.source)[:size].view(dtype), total[:size].view(dtype)
        with self._device.lane(op.lane):
            if home.has_grad:
                old.add_(new)
            else:
                old.copy_(new)
        home.has_grad = True

    def _norm(self, op: Op, home: UnitHome) -> None:
        if not home.has_grad:
            return
        grad = self._grad_at(op, home)
        elements = required(grad, f"unit {op.unit} has no gradient at rest")[: home.layout.grad_bytes].view(
            home.layout.dtype
        )[: home.layout.num_trainable]
        with self._device.lane(op.lane):
            total = sum_squares(elements, self._threads)
        if not math.isfinite(total) and self.step.non_finite is None:  # what comes later has it from the first one
            self.step.non_finite = op.unit
        self.step.squares[op.unit] = total
        own = self.step.own
        own.unit_scales[op.unit] = own.clipping.of_unit(math.sqrt(total) / own.loss_scale)
        self.step.own.units.add(op.unit)

    def _global_norm(self) -> None:
        self._require_finite()
        self.step.own.scale = self.step.own.clipping.of_all(self.step.grad_norm())

    def _require_finite(self) -> None:
        if self.step.non_finite is not None:
            applied = (
                "units that come later in the model were updated before that was known, for nothing waits for the "
                "global norm: resume from the last saved point"
                if self.step.in_place
                else "nothing of the step was applied: lower the learning rate or look at the batch"
            )
            raise NonFinite(f"a gradient of {self._names[self.step.non_finite]} is infinite or not a number; {applied}")

    def _read_grad(self, op: Op, home: UnitHome) -> None:
        spill = required(home.spill, f"unit {op.unit} has no gradient on disk")
        if home.has_grad:
            self._homes.need_disk().read(self._homes.read_engine, spill, self._buffer(op.target)[: spill.num_bytes])

    def _write_grad(self, op: Op, home: UnitHome) -> None:
        spill = required(home.spill, f"unit {op.unit} has no room on disk for its gradient")
        if home.has_grad:
            move = (spill, self._buffer(op.source)[: spill.num_bytes])
            self._homes.need_disk().write_all(self._homes.write_engine, [move])

    # Updates #

    def _read_state(self, op: Op, home: UnitHome) -> None:
        part = SlabRange(home, op.start, op.stop)
        moves = part.reads(self._buffer(op.target), newest=op.source == WRITTEN)
        if self._skips(op):  # its weights may be fetched this way all the same
            moves = part.weight_reads(self._buffer(op.target))
        self._homes.need_disk().read_all(self._homes.read_engine, moves)

    def _update(self, op: Op, home: UnitHome) -> None:
        due = self.step.late if op.late else self.step.own
        if due is None or self._skips(op):
            return
        if home.where.visits:
            self._update_visitor(op, home, due)
            return
        slab = None if op.target == HOME else self._buffer(op.target)
        part = SlabRange(home, op.start, op.stop)
        if not self._may_change(op, due, slab is not None and part.is_written):
            return
        if op.unit in due.units:
            with self._device.lane(op.lane):
                self._apply(op, home, due, part.arrays(slab, self._grad_at(op, home)))
        if slab is not None:
            part.check(slab, self._threads)

    def _may_change(self, op: Op, due: Due, written: bool) -> bool:
        """Whether the update happens, and a place for what it writes. Raises NonFinite."""
        if not op.late:
            self.step.applied_scale = due.scale
            if self.step.non_finite is not None and self.step.may_take_back:
                return False  # the norm, which is waited for, says so
            self._require_finite()
        if written:
            self._homes.units[op.unit].next_extent()  # that there is one is known before anything changes
        return True

    # Updates on the device, of states that rest elsewhere #

    def _upload_state(self, op: Op, home: UnitHome) -> None:
        if self._skips(op):
            return
        here, there = self._visitor(op, home, op.source, op.target)
        self._device.copy("upload", zip(there, here, strict=True))

    def _upload_grad(self, op: Op, home: UnitHome) -> None:
        due = self.step.late if op.late else self.step.own
        if self._skips(op) or due is None or op.unit not in due.units:
            return
        part = SlabRange(home, op.start, op.stop)
        there = laid_in(part.blank(), self._buffer(op.target)).grad
        self._device.copy("upload", [(there, part.grad(self._grad_at(op, home)))])

    def _update_visitor(self, op: Op, home: UnitHome, due: Due) -> None:
        if self._may_change(op, due, SlabRange(home, op.start, op.stop).is_written) and op.unit in due.units:
            there = laid_in(SlabRange(home, op.start, op.stop).blank(), self._buffer(op.target))
            with self._device.lane(op.lane):
                self._apply(op, home, due, there)

    def _download_state(self, op: Op, home: UnitHome) -> None:
        if self._skips(op):
            return
        here, there = self._visitor(op, home, op.target, op.source)
        self._device.copy("download", zip(here, there, strict=True))
        if op.target != HOME:
            SlabRange(home, op.start, op.stop).check(self._buffer(op.target), self._threads)

    def _visitor(
        self, op: Op, home: UnitHome, resting: str, slot: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What an update changes, where it rests (or passes through a slab) and in its slot on the device."""
        part = SlabRange(home, op.start, op.stop)
        slab = None if resting == HOME else self._buffer(resting)
        blank = part.blank()
        return part.arrays(slab, blank.grad).stored(), laid_in(blank, self._buffer(slot)).stored()

    def _apply(self, op: Op, home: UnitHome, due: Due, arrays: StateRange) -> None:
        if home.weight is not None or home.state is not None:
            self._homes.before_change(op.unit)
            if op.late:
                self.step.late_in_place = True
            elif not self.step.may_take_back:
                self.step.in_place = True
        for start, stop, group in self._segments[op.unit]:
            begin, end = max(start, op.start), min(stop, op.stop)
            if begin < end:
                part = arrays.narrow(begin - op.start, end - begin)
                due.clipping.clamp(part.grad, due.loss_scale)
                hyper = replace(due.hypers[group], step=due.numbers[op.unit])
                update_range(part, hyper, due.factor(op.unit), self._threads)

    def _write_state(self, op: Op, home: UnitHome) -> None:
        if self._skips(op):
            return
        if home.in_place:
            self._homes.before_overwrite()
            self.step.late_in_place |= op.late
            self.step.in_place |= not op.late
        moves = SlabRange(home, op.start, op.stop).writes(self._buffer(op.source))
        self._homes.need_disk().write_all(self._homes.write_engine, moves)

    def _commit(self, op: Op) -> None:
        if self.step.late is None if op.late else self.step.guessed_wrong:
            return
        if self._homes.disk is not None and any(unit.written is not None for unit in self._homes.units):
            self.step.late_in_place |= (
                op.late
            )  # a drive that fails to sync may have lost what was written within its step
            self._homes.disk.sync()
        self._homes.flip()
        if op.late:
            self.step.at_rest = True
            self.on_rest()
