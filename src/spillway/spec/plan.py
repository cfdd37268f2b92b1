"""The plan: what lives where, and the list of operations of one step. See docs/architecture.md, 'The plan is data'."""

from dataclasses import dataclass
from typing import NamedTuple

KINDS = (
    "READ",
    "UPLOAD",
    "FORWARD",
    "LOSS",
    "BACKWARD",
    "DOWNLOAD",
    "ACCUMULATE",
    "NORM",
    "UPDATE",
    "WRITE",
    "COMMIT",
)
# "update" is the CPU's optimizer, "device" the device's.
LANES = ("compute", "upload", "download", "read", "write", "update", "device")
GROUPS = ("weight", "grad", "state", "act", "none")
TIERS = ("device", "host", "disk")
# What is kept for backward: inputs of units only, with the outputs of matrix products and attention (the tape), or all
# that autograd saves, on the device as far as it fits; or all of it in host memory, or on disk.
ACTIVATIONS = ("auto", "recompute", "tape", "keep", "host", "disk")
# After backward; in backward, one unit after another (read, update, write: LoHan's baseline) or in a pipeline; or in
# the next forward.
UPDATE_MODES = ("serial", "overlap-naive", "overlap", "deferred")

# Where an operation reads or writes that is no slab: the unit's resting place in the store, and the unit as it was
# written last, in this step or before.
HOME, WRITTEN = "home", "written"


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a call is kept between its forward and its backward, and in which tier: its input; with it the outputs of
    some classes of operators, which are then not run again; or all that autograd saves."""

    tier: str
    tape: tuple[str, ...] = ()
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal slabs of one role in one tier."""

    name: str
    tier: str
    slab_bytes: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Of all its slabs."""
        return self.slab_bytes * self.count


class Op(NamedTuple):
    """One operation of the step. (Planning makes hundreds of thousands; a frozen dataclass takes six times as long to
    make.)

    `take` names (pool, lease) pairs acquired when it starts, `give` the leases returned when it ends. `source` and
    `target` name the leases it reads from and writes to, or HOME or WRITTEN. `start` and `stop` bound the elements of a
    subgroup of the unit (UPDATE and the READ and WRITE of its state).
    """

    id: int
    kind: str
    lane: str
    unit: int
    group: str
    amount: float  # bytes moved, FLOPs for compute, parameters for UPDATE
    deps: tuple[int, ...] = ()
    take: tuple[tuple[str, str], ...] = ()
    give: tuple[str, ...] = ()
    source: str = ""
    target: str = ""
    call: int = -1
    start: int = 0
    stop: int = 0
    late: bool = False  # of the step before


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """The tier where each part of a unit rests between steps."""

    weights: str
    states: str
    grads: str  # host; disk where gradients that wait for the norm do not fit; device where the states are
    defers: bool = False  # its update belongs to the next step's forward
    visits: bool = False  # its states are brought to the device to be updated there

    @property
    def update_lane(self) -> str:
        """Whose optimizer updates it."""
        return "device" if self.states == "device" or self.visits else "update"

    @property
    def has_host_weights(self) -> bool:
        """Whether weights rest in host memory: all they are, or what an update makes the device's of."""
        return self.weights == "host" or (self.weights == "device" and self.states in ("host", "none"))

    @property
    def updates_disk_weights(self) -> bool:
        """Whether an update reads weights from disk and writes them there: all they are, or what the device's are made
        of."""
        return self.weights == "disk" or (self.weights == "device" and self.states == "disk")


ON_THE_DEVICE = UnitPlacement("device", "device", "device")


@dataclass(frozen=True, slots=True)
class KeepPoints:
    """Saved points: how many stay, and whether there is room on disk also for units that rest in memory. With none,
    steps are made in place: that takes half the disk, a crash loses what was trained, and only a run that is stopped
    can be gone on with, if `of_memory` or nothing rests in memory."""

    last: int = 1
    of_memory: bool = True


LAST_POINT = KeepPoints()
IN_PLACE = KeepPoints(0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Every free variable of a plan; lowering turns it into operations without further choices."""

    units: tuple[UnitPlacement, ...]
    acts: tuple[Kept, ...]  # per call
    update: str  # one of UPDATE_MODES
    clip: bool  # the global norm is needed before the first update: to clip by it, or to drop the step
    accumulation: int  # backward calls per optimizer step
    window: int  # device slots per weight pool
    state_slabs: int
    subgroup: int  # elements updated by one UPDATE
    in_turn: bool = False  # every operation waits for the one before it: nothing overlaps
    grad_slots: int = 2  # so that a download overlaps the next backward; 1 where there is no room
    keep: KeepPoints = LAST_POINT
    streams: int = 1  # micro-batches of a call that the device computes side by side
    ahead: int = 0  # subgroups whose states are read in backward where all updates are left to the next forward

    @property
    def overlaps(self) -> bool:
        """Whether units are updated while backward goes on."""
        return self.update in ("overlap", "overlap-naive")

    @property
    def speculates(self) -> bool:
        """Whether units are updated before the norm is known, as if nothing were clipped; where that proves wrong, what
        was written is dropped, and all of them are updated in the next forward."""
        return self.clip and self.overlaps

    @property
    def mixed_in(self) -> int:
        """Units whose updates are left to the next forward, where others are made within the step."""
        return sum(where.defers for where in self.units) if self.overlaps else 0

    @property
    def visits(self) -> bool:
        """Whether states that rest elsewhere are brought to the device to be updated there."""
        return any(where.visits for where in self.units)

    def keeps_gradient(self, unit: int) -> bool:
        """Whether the gradient of a unit may still be wanted after the backward it came from."""
        return self.clip or self.update == "serial" or self.units[unit].defers


@dataclass(frozen=True, slots=True)
class TierPeaks:
    """Highest number of bytes of each tier."""

    device: int
    host: int
    disk: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement, pools, the operations of a step and what they are predicted to cost.

    `ops` is the forward and backward that ends a step; `accumulate_ops` one that only adds to the gradients (empty
    without accumulation). Deferred updates belong to the next step's forward: they stand in `ops`, or with accumulation
    in `begin_ops`, the first forward and backward of several; `flush_ops` are they alone, for when no forward follows.
    Where updates are speculative, `wary_ops` ends a step that leaves all of them to the next, and with accumulation
    `wary_begin_ops` begins the next. Where states are read ahead, `warm_ops` begins with leases that it also leaves to
    the next list (`kept`, with their pools), and `cold_ops` begins without them. Lists run in their order per lane;
    leases of a pool are granted in list order (see plan.check).
    """

    placement: Placement
    pools: tuple[Pool, ...]
    ops: tuple[Op, ...]
    accumulate_ops: tuple[Op, ...] = ()
    begin_ops: tuple[Op, ...] = ()
    wary_ops: tuple[Op, ...] = ()
    wary_begin_ops: tuple[Op, ...] = ()
    flush_ops: tuple[Op, ...] = ()
    cold_ops: tuple[Op, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    peaks: TierPeaks = TierPeaks(0, 0, 0)
    step_seconds: float = 0.0
    wary_step_seconds: float = 0.0  # of a wary step, where there are any
    bottleneck: str = ""
    notes: tuple[str, ...] = ()

    @property
    def lists(self) -> tuple[tuple[Op, ...], ...]:
        """Every list that runs by itself."""
        begin, wary_begin = self.begin_ops, self.wary_begin_ops
        return self.ops, self.accumulate_ops, begin, self.wary_ops, wary_begin, self.flush_ops, self.cold_ops

    @property
    def warm_ops(self) -> tuple[Op, ...]:
        """The list that leaves what it reads ahead to itself, if any does: that of a step all of whose updates are made
        in the next forward."""
        return self.wary_ops if self.placement.speculates else self.ops

    def round_ops(self, is_first: bool, is_last: bool, wary: bool = False) -> tuple[Op, ...]:
        """What runs at a forward and backward of an optimizer step, that guesses at the norm or is wary."""
        if is_last:
            return self.wary_ops if wary else self.ops
        begin = self.wary_begin_ops if wary else self.begin_ops
        return begin if is_first and begin else self.accumulate_ops

    def rounds(self, wary: bool = False) -> list[tuple[Op, ...]]:
        """What runs in an optimizer step, in turn."""
        times = self.placement.accumulation
        return [self.round_ops(index == 0, index == times - 1, wary) for index in range(times)]

    def predicted_seconds(self, wary: bool) -> float:
        """Of an optimizer step that is wary or not."""
        return self.wary_step_seconds if wary and self.wary_ops else self.step_seconds

    @property
    def bytes_written(self) -> float:
        """To disk, by one optimizer step."""
        return sum(op.amount for ops in self.rounds() for op in ops if op.kind == "WRITE")
