"""One model in training: turns the user's forward, backward and optimizer step into the operations of the plan."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spillway.model.binding import bound, make_placeholders
from spillway.model.profile import CallShape, UnitCall
from spillway.model.units import Unit
from spillway.optim.clip import Clipping, LossScale
from spillway.optim.update import Hyper
from spillway.runtime.activations import Activations
from spillway.runtime.buffers import BufferGuard
from spillway.runtime.calls import own_copy, run_in_pieces
from spillway.runtime.device import Device
from spillway.runtime.executor import Executor
from spillway.runtime.forward_only import ForwardOnly
from spillway.runtime.lanes import HOME, Due, LaneWorker, StepState
from spillway.runtime.rounds import Rounds
from spillway.runtime.schedules import Planner, Schedule, Schedules
from spillway.runtime.unit import run_in_step, stand_down, stand_in
from spillway.runtime.window import bind_residents, leaves, unbind_residents, weight_views
from spillway.spec.errors import UsageError, invariant
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Op, Plan
from spillway.spec.trace import Trace
from spillway.store.arena import SlabPools
from spillway.store.placed import PlacedStore


@dataclass(slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    wary: bool  # by the plan's `wary_ops`
    traces: list[Trace] = field(default_factory=list)
    skipped: bool = False


# A wrong guess costs an update that is dropped, and going over to guessing one that nothing overlaps with.
_CALM_STEPS = 3


class Session:
    """Owns the lanes and the store while a model trains. Made by `spillway.prepare`."""

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        device: Device,
        planner: Planner,
        store: PlacedStore,
        accumulation: int,
        micro_batch: int | None,
        threads: int,
    ) -> None:
        self.model = model
        self.units = units
        self.device = device
        self.store = store
        self.anchor = torch.zeros((), requires_grad=True, device=device.torch_device)
        self.rounds = Rounds(accumulation)
        self.result: StepResult | None = None
        self.schedule: Schedule | None = None
        self._laid: Schedule | None = None  # whose slabs the arena is cut into
        self.hypers: Callable[[], list[Hyper]] = list
        self.on_rest: Callable[[], None] = _nothing  # called by a lane when deferred updates have come to rest
        self.clipping = Clipping()
        self.loss_scale = LossScale()
        self.segments: list[list[tuple[int, int, int]]] = []
        self.batch_hooks: list[Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]] = []
        self.on_undo: list[Callable[[], None]] = []
        self._threads = threads
        self._placeholders = make_placeholders(units)
        self.schedules = Schedules(
            model,
            units,
            device.torch_device,
            self._placeholders,
            planner,
            micro_batch,
            lambda: self.is_open,
            self._open_empty,
            self._on_demand,
        )
        self._worker: LaneWorker | None = None
        self._executor: Executor | None = None
        self.step_number = 0  # of forwards; a backward belongs to the newest
        self._in_step = False
        self._next_call = 0
        self._in_backward = False
        self._in_forward = False
        self._buffers = BufferGuard()
        self._closed = False
        self._half_done = False  # a failed step has changed what rests in host memory
        self._due: Due | None = None  # the last step's updates, where they belong to the next forward
        self._unclipped = 0  # steps in a row whose gradients were not clipped
        self._traces: list[Trace] = []
        self._activations: Activations | None = None  # of the forward under way
        self.forward_only = ForwardOnly()
        self.wants_logits = True  # of forwards without gradients
        stand_in(self, units, self._placeholders)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    # Opening #

    @property
    def is_open(self) -> bool:
        """Whether the weights rest in the store. Raises UsageError once it was closed."""
        if self._closed:
            raise UsageError("the model was closed: prepare it again, with resume=True to go on from its saved point")
        return self._executor is not None

    @property
    def is_running(self) -> bool:
        """Whether it was opened and not closed."""
        return self._executor is not None

    @property
    def placeholders(self) -> dict[str, nn.Parameter]:
        """What stands in the module tree for each parameter."""
        return self._placeholders

    def open(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Schedule:
        """Plan for this batch, take the memory and the disk space, and load the weights. Without a batch only the
        resting places are planned. Raises PlanInfeasible and DiskError before anything is computed."""
        kwargs = kwargs or {}
        for hook in self.batch_hooks:
            kwargs = hook(args, kwargs)
        schedule = self.schedules.of(args, kwargs)
        self._ensure_open(schedule)
        return schedule

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelProfile:
        """What a step on this batch would be, without opening anything."""
        for hook in self.batch_hooks:
            kwargs = hook(args, kwargs)
        return self.schedules.of(args, kwargs).profile

    def close(self) -> None:
        """End the lanes and release memory, files and locks."""
        self._closed = True
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        self.store.close()

    def _ensure_open(self, schedule: Schedule) -> None:
        if not self.is_open or self._executor is None or self._worker is None:
            with torch.inference_mode(False):
                self.store.open(schedule.plan, schedule.profile)
            self._worker = LaneWorker(
                self.device, self.store.homes, self.segments, [unit.name for unit in self.units], self._threads
            )
            self._worker.on_rest = self.on_rest
            self._executor = Executor(self.device, self._worker)
        if self.schedule is not schedule:
            invariant(self._executor.idle, "the plan changed within a step")
            self.schedule = schedule
        if self.store.pools is None or self._laid is not schedule:
            self._worker.pools = None
            self._executor.forget_pools()
            self.store.name_slabs(schedule.plan, schedule.profile)
            with torch.inference_mode(False):
                self.store.lay_slabs(schedule.plan)
            self._laid = schedule

    def _open_empty(self) -> None:
        """Weights come to rest before any batch is known."""
        self._ensure_open(self.schedules.of((), {}))

    def undo(self, params: dict[str, nn.Parameter]) -> None:
        """Give the model its own forwards and parameters back: nothing was stored yet."""
        for hook in self._hooks:
            hook.remove()
        for undo in self.on_undo:
            undo()
        stand_down(self.units, params)

    # The user's forward #

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.schedules.is_profiling:
            return None
        if not torch.is_grad_enabled():
            if not self._in_step:
                self._begin_forward_only()
            return None
        for hook in self.batch_hooks:
            kwargs = hook(args, kwargs)
        self._begin(args, kwargs)
        return args, kwargs

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._in_forward = False
        if not torch.is_grad_enabled() and not self._in_step:
            self.forward_only.end(is_whole=output is not None)

    def _begin_forward_only(self) -> None:
        """Every unit as it is at rest, and those outside any call bound. Between the backwards of a step each unit is
        fetched when it is called."""
        self.forward_only.give_up()
        if not self.is_open:
            self.open()
        self.come_to_rest()
        bind_residents(self.units, self.store.homes, with_grads=False)
        if self.rounds.is_first and self.schedule is not None:
            self._ensure_open(self.schedule)
            executor, _ = self._parts()
            self.forward_only.begin(executor, self.schedule, lambda ops: self._start(ops, StepState()))

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(unit.layout.num_trainable for unit in self.units):
            raise UsageError("this model streams for forwards alone: call it under torch.no_grad()")
        self.rounds.refuse_more()
        self.settle()
        self._refuse_half_done()
        schedule = self.schedules.of(args, kwargs)
        plan = schedule.plan
        wary = plan.placement.speculates and self._unclipped < _CALM_STEPS
        if schedule.calls_beside or (self._due is not None and self._due.sweeping and not wary):
            self.come_to_rest()
        self._ensure_open(schedule)
        extents = self.store.act_extents(plan, schedule.profile)
        step = StepState(
            Due(self.hypers(), self.clipping, self.loss_scale.value, sweeping=wary),
            self._due,
            may_take_back=plan.placement.speculates,
            act_extents=extents,
        )
        self.rounds.begin()
        self._start(plan.wary_ops if wary else plan.round_ops(self.rounds.is_first, self.rounds.is_last), step)
        self._activations = Activations(schedule, self._pools(), step.acts)
        self.step_number += 1
        self._in_step, self._in_backward, self._next_call = True, False, 0
        self._in_forward = True
        self._await_resident()
        bind_residents(self.units, self.store.homes, with_grads=True)

    def _start(self, ops: tuple[Op, ...], step: StepState) -> None:
        executor, worker = self._parts()
        worker.pools, worker.step = self.store.pools, step
        self._pools().fence(self.device.mark())
        executor.start(ops, self._pools())

    def _await_resident(self) -> None:
        """Parameters outside any unit, as the last step left them."""
        executor, _ = self._parts()
        op = executor.upcoming_compute()
        if op is not None and op.kind == "FORWARD" and op.call < 0:
            executor.skip_compute(op)

    @property
    def is_intact(self) -> bool:
        """Whether what rests in the store is the end of a whole step."""
        return not self._half_done

    @property
    def awaits_step(self) -> bool:
        """Whether the last backward of a step has run and `optimizer.step()` has not."""
        return self.rounds.is_complete

    @property
    def is_due(self) -> bool:
        """Whether the last step's updates belong to the forward that comes next."""
        return self._due is not None

    def settle(self) -> None:
        """Give up a forward that no backward followed, or a step that failed, and let a backward's updates come to
        rest. Raises what a lane raised."""
        self.forward_only.give_up()
        if self._activations is not None:
            self._activations.close()
            self._activations = None
        if self._executor is None:
            return
        if not self._in_step:
            self._executor.come_to_rest()
            if self._executor.has_failed and self._worker is not None:
                self._half_done |= self._worker.step.is_half_done
        else:
            self._give_up()
        self._note_rest()
        self._executor.raise_untold()

    def come_to_rest(self) -> None:
        """As `settle`, and carry out the updates that wait for the next forward: the store is then that of the last
        step. Raises what a lane raised, and UsageError while a guess at a step may still have to be taken back."""
        self._refuse_guess()
        self.settle()
        if self._due is None or self._half_done or self.schedule is None:
            return
        self._ensure_open(self.schedule)
        executor, _ = self._parts()
        self._start(self.schedule.plan.flush_ops, StepState(late=self._due))
        try:
            self._traces.append(executor.wait())
        except BaseException:
            executor.abandon()
            self.store.homes.forget_written()
            _, worker = self._parts()
            self._half_done |= worker.step.is_half_done
            self._note_rest()
            raise
        self._note_rest()

    def _refuse_guess(self) -> None:
        if self.awaits_step and self._worker is not None:
            step = self._worker.step
            if step.may_take_back and step.applied_scale is not None:
                raise UsageError("backward has run and the step is not finished: call optimizer.step() first")

    def _give_up(self) -> None:
        executor, worker = self._parts()
        try:
            self._run_out()
        finally:
            executor.abandon()
            self._half_done |= worker.step.is_half_done
            self._take_back()
            if self.rounds.is_first or self._in_backward or executor.has_failed:
                self.rounds.start_anew()
                self._traces = []
                for home in self.store.homes.units:
                    home.has_grad = False
            self._in_step = self._in_backward = False

    def _take_back(self) -> None:
        """What the step under way has written is the state of nothing."""
        _, worker = self._parts()
        homes = self.store.homes
        if not worker.step.may_take_back:
            homes.forget_written()
            return
        try:
            homes.take_back()
        except BaseException:
            self._half_done = True
            raise

    def _run_out(self) -> None:
        """Of a forward that is given up: the updates of the step before it."""
        executor, worker = self._parts()
        commit = executor.find_late("COMMIT")
        if commit is not None and worker.step.late is not None and not executor.has_failed:
            executor.run_out(commit)

    def _note_rest(self) -> None:
        if self._worker is not None and self._due is not None:
            step = self._worker.step
            if step.late is self._due and step.at_rest:
                self._due = None

    def _refuse_half_done(self) -> None:
        if self._half_done:
            raise UsageError(
                "a step that failed left some units updated and others not: close this model and resume from the last "
                "saved point"
            )

    def call(self, call: UnitCall) -> Any:
        """What the call of a unit's member gives. Raises UsageError where it cannot be trained."""
        if self.schedules.is_profiling:
            return self.schedules.profile_call(call)
        if not torch.is_grad_enabled():
            op = None if self._in_step else self.forward_only.next_op(call.unit)
            with self._on_demand(call.unit) if op is None else self._fetched(op) as slot:
                result = run_in_pieces(call) if call.kind == "LOSS" else call.run()
                return tree_map_only(torch.Tensor, lambda output: own_copy(output, slot), result)
        if not self._in_step:
            raise UsageError(
                f"{call.member or 'a unit'} was called by itself with gradients enabled: only calls within the forward "
                f"of {type(self.model).__name__} are trained; call it there, or under torch.no_grad()"
            )
        index = self._next_call
        self._next_call += 1
        shapes = self._shapes()
        if index >= len(shapes) or (shapes[index].unit, shapes[index].member) != (call.unit, call.member):
            raise UsageError(
                f"the forward called {call.member} where the profiled forward did not: a model whose order of calls "
                f"changes from batch to batch cannot be trained by Spillway"
            )
        return run_in_step(self, index, call)

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """Forwards inside are for their loss alone, also without gradients."""
        before, self.wants_logits = self.wants_logits, False
        try:
            yield
        finally:
            self.wants_logits = before

    @contextmanager
    def _on_demand(self, unit: int) -> Iterator[torch.Tensor]:
        """A unit by itself, in the buffer that is given: for evaluation, generation and profiling."""
        if not self.is_open:
            self.open()
        if not self._in_step or not self._is_up_to_date():
            self.come_to_rest()
        slot = self.store.fetch(unit, beside_step=self._in_step)
        with bound(self.units[unit], weight_views(self.units[unit], slot), self._placeholders):
            yield slot

    @contextmanager
    def _fetched(self, op: Op) -> Iterator[torch.Tensor]:
        """The unit of a compute operation is bound, in its slot, which is given; the operation ends with it."""
        executor, _ = self._parts()
        start = executor.begin_compute(op)
        with self._bound_leaves(self.units[op.unit], op, None) as (slot, _):
            yield slot
        executor.end_compute(op, start)

    def _is_up_to_date(self) -> bool:
        """Whether weights at rest are those of the last step; waits for that where backward may still come. Not where
        a forward was left half way."""
        executor, worker = self._parts()
        commit = executor.find_late("COMMIT")
        if commit is None or worker.step.late is None or worker.step.at_rest:
            return True
        following = executor.upcoming_compute()
        if following is not None and following.id < commit.id:
            invariant(not self._in_forward, "a unit that is called without gradients was not seen in the profile")
            return False
        executor.run_out(commit)
        return True

    # Called by the unit function #

    def check_current(self, step_number: int) -> None:
        """Raise UsageError for the backward of a forward whose activations are gone."""
        if step_number != self.step_number or not self._in_step:
            raise UsageError(
                "backward came for the loss of an earlier forward: run loss.backward() before the next forward"
            )

    @property
    def activations(self) -> Activations:
        """What backward needs of the calls of this forward."""
        if self._activations is None:
            raise AssertionError("no forward is under way")
        return self._activations

    def shape(self, index: int) -> CallShape:
        """How to run a call."""
        return self._shapes()[index]

    @contextmanager
    def forward_of(self, index: int) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """The unit of a call is in its slot and bound (both are given); afterwards the slot is free for the next."""
        op = self._next_compute(index, backward=False)
        executor, _ = self._parts()
        start = executor.begin_compute(op)
        unit = self.units[op.unit]
        with self._bound_leaves(unit, op, None) as (slot, views), self._buffers.first_time(unit):
            yield slot, views
        executor.end_compute(op, start)

    @contextmanager
    def backward_of(self, index: int) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """As `forward_of`, with gradient views; operations of calls autograd did not reach are passed over."""
        executor, worker = self._parts()
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        op = self._next_compute(index, backward=True)
        start = executor.begin_compute(op)
        grads = None
        if op.target:
            grads = self._open_gradient(op, worker)
        unit = self.units[op.unit]
        with self._bound_leaves(unit, op, grads) as (slot, views), self._buffers.again(unit):
            yield slot, views
        executor.end_compute(op, start)

    def _open_gradient(self, op: Op, worker: LaneWorker) -> torch.Tensor:
        """Where the unit's gradients are summed: zero before the first call of this backward, or, where they stay on
        the device, of this optimizer step."""
        home = self.store.homes.units[op.unit]
        stays = op.target == HOME
        grads = home.device_grad if stays else self._pools().buffer(op.target)
        if grads is None:
            raise AssertionError(f"{self.units[op.unit].name} has no gradient buffer on the device")
        if not (home.has_grad if stays else op.unit in worker.step.fresh):
            grads[: self.units[op.unit].layout.grad_bytes].zero_()
        if stays:
            home.has_grad = True
        worker.step.fresh.add(op.unit)
        return grads

    # The user's backward and step #

    def finish(self) -> StepResult:
        """The optimizer step: wait for the list to end, and note which updates the next forward has to make. Raises
        what a lane raised (NonFinite, DiskError)."""
        self.rounds.refuse_incomplete()
        if self._in_step:
            raise UsageError("optimizer.step() came before backward was over: run loss.backward() first")
        executor, worker = self._parts()
        try:
            self._traces.append(executor.wait())
        except BaseException:
            self._in_step = True
            self.rounds.start_anew()
            try:
                self._run_out()
            finally:
                executor.abandon()
                self._note_rest()
            raise
        self._note_rest()
        wary = worker.step.own.sweeping
        self._note_due(worker.step)
        self.rounds.start_anew()
        for home in self.store.homes.units:
            home.has_grad = False
        self.result = StepResult(worker.step.grad_norm(), wary, self._traces)
        self._traces = []
        return self.result

    def _note_due(self, step: StepState) -> None:
        """Which updates of the step that is over belong to the next forward."""
        placement, due = self._plan().placement, step.own
        self._unclipped = self._unclipped + 1 if due.scale == 1.0 else 0
        if step.guessed_wrong:
            self._take_back()
            due.sweeping = True
        if placement.update == "serial":
            return
        if not due.sweeping:
            due.units = {unit for unit in due.units if placement.units[unit].defers}
        if due.sweeping or any(where.defers for where in placement.units):
            self._due = due

    def _end_backward(self) -> None:
        executor, worker = self._parts()
        try:
            while (op := executor.upcoming_compute()) is not None:
                if op.call < 0 and not self.units[op.unit].members:
                    worker.step.fresh.add(op.unit)
                    home = self.store.homes.units[op.unit]
                    home.has_grad |= home.where.states == "device"
                executor.skip_compute(op)
            if not self.rounds.is_last:
                self._traces.append(executor.wait())
        finally:
            unbind_residents(self.units, self._placeholders)
        # Only now: a step that failed is given up by `settle`.
        self._in_step = self._in_backward = False
        self.rounds.end()

    # Small helpers #

    def _next_compute(self, index: int, backward: bool) -> Op:
        executor, _ = self._parts()
        while True:
            op = executor.upcoming_compute()
            invariant(op is not None, "the step has no operation left for this call")
            if op is None:
                raise AssertionError
            if op.call == index and (op.kind == "BACKWARD") == backward:
                return op
            invariant(backward and op.kind == "BACKWARD", f"call {index} ran out of order")
            executor.skip_compute(op)

    @contextmanager
    def _bound_leaves(
        self, unit: Unit, op: Op, grads: torch.Tensor | None
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        home = self.store.homes.units[op.unit].device_weight
        slot = home if op.source == HOME else self._pools().buffer(op.source)
        invariant(slot is not None, f"{unit.name} is not on the device")
        if slot is not None:
            views = leaves(unit, slot, grads)
            with bound(unit, views, self._placeholders):
                yield slot, views

    def _parts(self) -> tuple[Executor, LaneWorker]:
        if self._executor is None or self._worker is None:
            raise UsageError("the model was closed")
        return self._executor, self._worker

    def _pools(self) -> SlabPools:
        if self.store.pools is None:
            raise AssertionError("no slabs are laid out")
        return self.store.pools

    def _plan(self) -> Plan:
        if self.schedule is None:
            raise AssertionError("no plan is in force")
        return self.schedule.plan

    def _shapes(self) -> tuple[CallShape, ...]:
        if self.schedule is None:
            raise AssertionError("no plan is in force")
        return self.schedule.shapes


def _nothing() -> None:
    """Nobody waits for it."""
