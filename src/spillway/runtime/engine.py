"""The lanes, the store and the slots of one model: opened for a plan, they run its lists of operations."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from spillway.hardware.limits import trim_heap
from spillway.model.binding import bound
from spillway.model.units import Unit
from spillway.runtime.device import Device
from spillway.runtime.executor import Executor
from spillway.runtime.lanes import LaneWorker, StepState
from spillway.runtime.room import finding_room
from spillway.runtime.schedules import Schedule
from spillway.runtime.window import Gradients, leaves, sums_of
from spillway.spec.defaults import nothing
from spillway.spec.errors import UsageError, invariant, required
from spillway.spec.plan import HOME, Op
from spillway.store.arena import SlabPools
from spillway.store.placed import PlacedStore


class Engine:
    """Has nothing to do until it is opened, and nothing any more once it is closed.

    `segments`: per unit, (start, stop, parameter group) ranges of its trainable elements. `on_rest` is called by a lane
    when deferred updates have come to rest.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        placeholders: Mapping[str, nn.Parameter],
        device: Device,
        store: PlacedStore,
        threads: int,
    ) -> None:
        self.units = units
        self.device = device
        self.store = store
        self.segments: list[list[tuple[int, int, int]]] = []
        self.on_rest: Callable[[], None] = nothing
        self.schedule: Schedule | None = None  # in force
        self._laid: Schedule | None = None  # whose slabs the arena is cut into
        self._placeholders = placeholders
        self._threads = threads
        self._worker: LaneWorker | None = None
        self._executor: Executor | None = None
        self._works: dict[int, int] = {}  # bytes that a call of a unit takes at most while it is computed
        self._closed = False

    @property
    def is_running(self) -> bool:
        """Whether it was opened and not closed."""
        return self._executor is not None

    @property
    def is_open(self) -> bool:
        """Whether the weights rest in the store. Raises UsageError once it was closed."""
        if self._closed:
            raise UsageError("the model was closed: build or load it anew, and prepare that with resume=True to go on")
        return self.is_running

    def open(self, schedule: Schedule) -> None:
        """Bring this plan into force: take the memory and the disk space, and load the weights, the first time; cut
        the arena into its slabs. Raises PlanInfeasible and DiskError before anything is computed."""
        if not self.is_open or self._executor is None or self._worker is None:
            trim_heap()  # of what planning has freed, before memory is taken
            with torch.inference_mode(False):
                self.store.open(schedule.plan, schedule.profile)
            names = [unit.name for unit in self.units]
            accumulates = schedule.plan.placement.accumulation > 1
            self._worker = LaneWorker(self.device, self.store.homes, self.segments, names, self._threads, accumulates)
            self._worker.on_rest = self.on_rest
            self._executor = Executor(self.device, self._worker)
        invariant(self.schedule is schedule or self._executor.idle, "the plan changed within a step")
        if self.store.pools is None or self._laid is not schedule:
            self._worker.pools = None
            self._executor.forget_pools()
            self.store.name_slabs(schedule.plan, schedule.profile)
            with torch.inference_mode(False):
                self.store.lay_slabs(schedule.plan)
            self._laid = schedule
            self._works = {}
            for call in schedule.profile.calls:
                self._works[call.unit] = max(self._works.get(call.unit, 0), call.work_bytes)
        self.schedule = schedule  # only now: one that found no room is not to be tried again

    def close(self) -> None:
        """End the lanes and release memory, files and locks."""
        self._closed = True
        executor, self._executor = self._executor, None
        try:
            if executor is not None:
                executor.close()
        finally:
            self._worker = None  # which holds the slabs
            self.store.close()

    def start(self, ops: tuple[Op, ...], step: StepState) -> None:
        """Begin a list; a step that does not find what the one before should have left to it, without that."""
        plan = self.in_force.plan
        leases = [lease for _, lease in plan.kept]
        if ops is plan.warm_ops and not self.pools.holds(leases):
            ops = plan.cold_ops
        finds = leases if ops is plan.warm_ops else []
        keeps = leases if ops is plan.warm_ops or ops is plan.cold_ops else []
        self.worker.pools, self.worker.step = self.store.pools, step
        begun = self.device.mark()
        self.pools.fence(begun)
        if step.late is not None:  # may change what rests on the device, which a forward before may still be reading
            self.device.settle([begun])
        self.executor.start(ops, self.pools, finds, keeps)

    @property
    def executor(self) -> Executor:
        """Runs the lists. Raises UsageError once everything was closed."""
        if self._executor is None:
            raise UsageError("the model was closed")
        return self._executor

    @property
    def worker(self) -> LaneWorker:
        """Carries out their operations."""
        return required(self._worker, "nothing was opened")

    @property
    def step(self) -> StepState:
        """Of the list under way, or the last one."""
        return self.worker.step

    @property
    def pools(self) -> SlabPools:
        """The slabs of the plan in force."""
        return required(self.store.pools, "no slabs are laid out")

    @property
    def in_force(self) -> Schedule:
        """The schedule that was opened last."""
        return required(self.schedule, "no plan is in force")

    def upcoming_call(self, index: int, backward: bool) -> Op:
        """The compute operation of a call; operations of calls that autograd did not reach are passed over. Raises
        UsageError where the call does not come when it should."""
        while (op := self.executor.upcoming_compute()) is not None:
            if op.call == index and (op.kind == "BACKWARD") == backward:
                return op
            if not backward or op.kind != "BACKWARD":
                break
            self.executor.skip_compute(op)
        name = self.in_force.shapes[index].member or "a unit"
        raise UsageError(
            f"{name} is not computed when it was planned to be for batches of this shape: a model that leaves blocks "
            f"out of some batches, or hands results of one block to another by an attribute, cannot be trained (hand "
            f"them over as arguments)"
        )

    @contextmanager
    def computing(self, op: Op) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor], Gradients | None]]:
        """One compute operation: its unit is in its slot and bound (both are given), in backward with where its
        gradients go; afterwards the slot is free for the next."""
        self.device.make_room(self._works.get(op.unit, 0), self.in_force.plan.peaks.host)
        begun = self.executor.begin_compute(op)
        gradients = self._open_gradients(op) if op.kind == "BACKWARD" and op.target else None
        unit, home = self.units[op.unit], self.store.homes.units[op.unit].device_weight
        here = f"{unit.name} is not on the device"
        slot = required(home, here) if op.source == HOME else self.pools.buffer(op.source)
        views = leaves(unit, slot)
        forks = self.in_force.plan.placement.streams > 1 and not torch.is_inference_mode_enabled()
        sums = sums_of(views.values()) if forks else []
        if gradients is not None:
            for name, leaf in views.items():
                gradients.collect(name, leaf)
        with finding_room(unit.name), bound(unit, views, self._placeholders):
            yield slot, views, gradients
        sums.clear()
        if gradients is not None:
            gradients.finish()
        self.executor.end_compute(op, begun)

    def _open_gradients(self, op: Op) -> Gradients:
        """Where the unit's gradients are summed: fresh at the first call of this backward, or, where they stay on the
        device, of this optimizer step."""
        home = self.store.homes.units[op.unit]
        stays = op.target == HOME
        name = self.units[op.unit].name
        at_home = f"{name} has no gradient buffer on the device"
        grads = required(home.device_grad, at_home) if stays else self.pools.buffer(op.target)
        is_fresh = not (home.has_grad if stays else op.unit in self.step.fresh)
        if stays:
            home.has_grad = True
        self.step.fresh.add(op.unit)
        gradients = Gradients(self.units[op.unit], grads, is_fresh)
        if self.in_force.profile.calls[op.call].kind == "LOSS":
            gradients.start_at_zero()
        return gradients

    def forget_gradients(self) -> None:
        """The optimizer step they belong to is over, or was given up."""
        for home in self.store.homes.units:
            home.has_grad = False
