"""One model in training: turns the user's forward, backward and optimizer step into the operations of the plan."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from spillway.model.binding import bound, make_placeholders
from spillway.model.profile import CallShape, UnitCall
from spillway.model.units import Unit
from spillway.optim.clip import Clipping, LossScale
from spillway.optim.update import Hyper
from spillway.runtime.activations import Activations
from spillway.runtime.buffers import BufferGuard
from spillway.runtime.calls import own_copy
from spillway.runtime.device import Device
from spillway.runtime.engine import Engine
from spillway.runtime.experts import RoutedExperts
from spillway.runtime.forks import Forks
from spillway.runtime.forward_only import ForwardOnly
from spillway.runtime.forwards import Forwards
from spillway.runtime.interrupts import uninterrupted
from spillway.runtime.laid_out import LaidOut
from spillway.runtime.lanes import Due, StepState
from spillway.runtime.rest import Rest
from spillway.runtime.room import finding_room
from spillway.runtime.rounds import Rounds
from spillway.runtime.schedules import Planner, Schedule, Schedules
from spillway.runtime.unit import SideOutputs, returned_alone, run_in_step, stand_down, stand_in
from spillway.runtime.window import Gradients, bind_residents, unbind_residents, weight_views
from spillway.runtime.within import num_calls
from spillway.spec.defaults import nothing
from spillway.spec.errors import UsageError, required
from spillway.spec.trace import StepResult
from spillway.store.placed import PlacedStore


class Phase(Enum):
    """How far the forward and backward under way have come."""

    NONE = 0  # no list is under way, or only updates are left of it
    FORWARD = 1
    FORWARD_OVER = 2
    BACKWARD = 3
    FAILED = 4  # at its end: the next forward gives it up


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
        # What stands in the module tree for each parameter.
        self.placeholders = make_placeholders(units, device.torch_device)
        self.engine = Engine(units, self.placeholders, device, store, threads)
        self.anchor = torch.zeros((), requires_grad=True, device=device.torch_device)
        self.rounds = Rounds(accumulation)
        self.rest = Rest(self.engine, self.rounds)
        self._hypers: Callable[[], list[Hyper]] = list
        self._clipping = Clipping()
        self._loss_scale = LossScale()
        self.side_outputs: SideOutputs = returned_alone
        self.on_undo: list[Callable[[], None]] = []
        self.on_begin: Callable[[], None] = nothing  # of the first forward of a step
        self.forwards = Forwards(
            model, units, device, self.placeholders, self._at_rest, self._on_demand, lambda: self.engine.is_running
        )
        self.schedules = Schedules(self.forwards, planner, micro_batch, lambda: self.engine.is_open)
        self.step_number = 0  # of forwards; a backward belongs to the newest
        self._laid_out = LaidOut(model, units, self.placeholders)
        self._phase = Phase.NONE
        self._is_whole = False  # the forward that is over gave something
        self._next_call = 0
        self._buffers = BufferGuard()
        self.forks = Forks(self._buffers)
        self._resident_sums: list[GradientEdge] = []
        self._activations: Activations | None = None  # of the forward under way
        self.forward_only = ForwardOnly()
        self._experts = RoutedExperts(units, store)
        self.wants_logits = True  # of forwards without gradients
        stand_in(self, units, self.placeholders)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    def train_by(
        self,
        hypers: Callable[[], list[Hyper]],
        segments: list[list[tuple[int, int, int]]],
        clipping: Clipping,
        loss_scale: LossScale,
    ) -> None:
        """How steps are made, from now on; without it the model computes forwards alone. `hypers`: the settings of each
        parameter group in the coming step. `segments`: see Engine."""
        self._hypers, self._clipping, self._loss_scale = hypers, clipping, loss_scale
        self.engine.segments = segments

    # Opening #

    def open(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Schedule:
        """Plan for this batch, take the memory and the disk space, and load the weights. Without a batch only the
        resting places are planned. Raises PlanInfeasible and DiskError before anything is computed."""
        with torch.inference_mode(False):  # what is made here is trained, whoever asks first
            schedule = self.schedules.of(args, kwargs or {})
            self.engine.open(schedule)
        return schedule

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Weights come to rest before any batch is known; those of residents are bound meanwhile."""
        self.engine.open(self.schedules.of((), {}))
        bind_residents(self.units, self.forwards.residents, self.store.homes)
        try:
            yield
        finally:
            unbind_residents(self.units, self.forwards.residents, self.placeholders)

    def undo(self, params: dict[str, nn.Parameter]) -> None:
        """Give the model its own forwards and parameters back: nothing was stored yet."""
        for hook in self._hooks:
            hook.remove()
        for undo in reversed(self.on_undo):
            undo()
        stand_down(self.units, params)

    # The user's forward #

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            _refuse_compiled()
        if self.forwards.is_profiling:
            return
        if torch.is_grad_enabled():
            self._begin(args, kwargs)
            return
        if self._phase is Phase.FORWARD and num_calls(self.model) < 2:  # Ctrl-C ended one: no hook is told
            self.settle()
        self._give_up_failed()
        if not self._in_step:
            self._begin_forward_only(args, kwargs)

    def _give_up_failed(self) -> None:
        """A step whose backward or whose end has raised: what it had written is not what is seen after it."""
        has_failed = self._phase is Phase.BACKWARD and torch._C._current_graph_task_id() < 0
        if has_failed or self._phase is Phase.FAILED:
            self.settle()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._phase is Phase.FORWARD and not torch.is_grad_enabled():
            return  # it calls itself, and goes on
        self.forks.end(is_whole=self._phase is Phase.FORWARD and output is not None)
        if self._phase is Phase.FORWARD:
            self._phase, self._is_whole = Phase.FORWARD_OVER, output is not None
        if not torch.is_grad_enabled() and not self._in_step:
            if not self._experts.are_picked:
                self.forward_only.end(is_whole=output is not None)
            self._experts.end()

    def _begin_forward_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Every unit as it is at rest, and those outside any call bound. Between the backwards of a step, and where
        experts are fetched as they are picked, each unit is fetched when it is called."""
        self.forward_only.give_up()
        if not self.engine.is_open:
            self.forwards.find_residents(self.forwards.batch(args, kwargs))
            self.open()
        self.come_to_rest()
        self.rest.refuse_half_done()
        bind_residents(self.units, self.forwards.residents, self.store.homes)
        self._experts.begin(args, kwargs)
        if self.rounds.is_first and not self._experts.are_picked:
            schedule = self.engine.in_force
            self.engine.open(schedule)
            self.forward_only.begin(self.engine.executor, schedule, lambda ops: self.engine.start(ops, StepState()))

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(unit.layout.num_trainable for unit in self.units):
            raise UsageError("this model streams for forwards alone: call it under torch.no_grad()")
        self.rounds.refuse_more()
        self._laid_out.refuse_changes(self._bound_resident)
        self._experts.end()
        self.settle()
        self.rest.refuse_half_done()
        schedule = self.schedules.of(args, kwargs)
        plan = schedule.plan
        wary = self.rest.is_wary(plan.placement)
        due = self.rest.due
        self.rounds.begin()
        alone = plan.placement.accumulation > 1 and self.rounds.is_first and self.rounds.is_last
        if schedule.profile.calls_beside or alone or (due is not None and due.sweeping and not wary):
            self.come_to_rest()  # the list that follows makes no updates of the step before
        self.engine.open(schedule)
        if self.rounds.is_first:
            self.on_begin()
        step = StepState(
            Due(
                self._hypers(),
                tuple(home.num_updates + 1 for home in self.store.homes.units),
                self._clipping,
                self._loss_scale.value,
                sweeping=wary,
            ),
            self.rest.due,
            may_take_back=plan.placement.speculates,
            act_extents=self.store.act_extents(plan, schedule.profile),
        )
        with uninterrupted():  # lanes without a step, or a step without lanes, would wait for ever
            self.engine.start(plan.round_ops(self.rounds.is_first, self.rounds.is_last, wary), step)
            self.step_number += 1
            self._phase, self._next_call = Phase.FORWARD, 0
            self._activations = Activations(schedule, self.engine.pools, step.acts)
        self._await_residents()
        self.forks.begin(schedule)
        self._resident_sums = bind_residents(
            self.units, self.forwards.residents, self.store.homes, self._begin_backward
        )

    def _bound_resident(self, unit: int) -> torch.Tensor | None:
        """The device memory whose views a forward without gradients left in the place of a resident unit's parameters,
        if it is one."""
        if unit not in self.forwards.residents or not self.engine.is_open:
            return None
        return self.store.homes.units[unit].device_weight

    def _await_residents(self) -> None:
        """Parameters that are bound all through, as the last step left them."""
        executor = self.engine.executor
        while (op := executor.upcoming_compute()) is not None and op.kind == "FORWARD" and op.call < 0:
            executor.skip_compute(op)

    @property
    def _in_step(self) -> bool:
        return self._phase is not Phase.NONE

    @property
    def awaits_step(self) -> bool:
        """Whether the last backward of a step has run and `optimizer.step()` has not."""
        return self.rounds.is_complete

    def settle(self) -> None:
        """Give up a forward that no backward followed, or a step that failed, and let a backward's updates come to
        rest. Raises what a lane raised."""
        self.forward_only.give_up()
        if self._activations is not None:
            self._activations.close()
            self._activations = None
        if not self.engine.is_running:
            return
        if self._in_step:
            try:
                self.rest.run_out()
            finally:
                self.rest.abandon(self._phase is Phase.BACKWARD)
                self._phase = Phase.NONE
        else:
            self.rest.await_lanes()
        self.rest.note()
        self.engine.executor.raise_untold()

    def come_to_rest(self) -> None:
        """As `settle`, and carry out the updates that wait for the next forward: the store is then that of the last
        step. Raises what a lane raised, and UsageError while a guess at a step may still have to be taken back."""
        self.rest.refuse_guess()
        self.settle()
        self.rest.flush()

    def call(self, call: UnitCall) -> Any:
        """What the call of a unit's member gives. Raises UsageError where it cannot be trained."""
        if call.unit in self.forwards.residents:
            return call.run_recomputed() if call.kind == "LOSS" else call.run()
        if self.forwards.is_profiling:
            return self.forwards.call(call)
        if not torch.is_grad_enabled():
            alone = self._in_step or self._experts.are_picked
            op = None if alone else self.forward_only.next_op(call.unit)
            with self._on_demand(call.unit) if op is None else self.engine.computing(op) as opened:
                slot = opened[0]
                result = call.run_in_pieces() if call.kind == "LOSS" else call.run()
                return tree_map_only(torch.Tensor, lambda output: own_copy(output, [slot]), result)
        if not self._in_step:
            raise UsageError(
                f"{call.member or 'a unit'} was called by itself with gradients enabled: only calls within the forward "
                f"of {type(self.model).__name__} are trained; call it there, or under torch.no_grad()"
            )
        index = self._next_call
        self._next_call += 1
        shapes = self.engine.in_force.shapes
        known = None if index >= len(shapes) else (shapes[index].unit, shapes[index].member, shapes[index].kind)
        if known != (call.unit, call.member, call.kind):
            raise UsageError(
                f"the forward called {call.member} where the profiled forward did not: a model whose order of calls "
                f"changes from batch to batch cannot be trained by Spillway (set layerdrop or stochastic depth to 0)"
            )
        return run_in_step(self, index, call)

    def plans_loss(self, unit: int) -> bool:
        """Whether a head gives its loss in the step under way, and not its logits."""
        return any((shape.unit, shape.kind) == (unit, "LOSS") for shape in self.engine.in_force.shapes)

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """Forwards inside are for their loss alone, also without gradients."""
        before, self.wants_logits = self.wants_logits, False
        try:
            yield
        finally:
            self.wants_logits = before

    @contextmanager
    def _on_demand(self, unit: int) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """A unit by itself (its buffer and its views are given): for evaluation, generation and profiling."""
        if not self.engine.is_open:
            self.open()
        self._give_up_failed()
        if not self._in_step or not self.rest.is_up_to_date(self._phase is Phase.FORWARD):
            self.come_to_rest()
            self.rest.refuse_half_done()
        with self._experts.fetched(unit, self._in_step) as slot:
            views = weight_views(self.units[unit], slot)
            with finding_room(self.units[unit].name), bound(self.units[unit], views, self.placeholders):
                yield slot, views

    # Called by the unit function #

    def check_current(self, step_number: int) -> None:
        """Raise UsageError for the backward of a forward whose activations are gone."""
        if step_number != self.step_number or not self._in_step:
            raise UsageError(
                "backward() was called on the loss of an earlier forward: call it before the next forward, or, if a "
                "loss needs several forwards, prepare one module that makes them and returns the loss"
            )

    @property
    def activations(self) -> Activations:
        """What backward needs of the calls of this forward."""
        return required(self._activations, "no forward is under way")

    def shape(self, index: int) -> CallShape:
        """How to run a call."""
        return self.engine.in_force.shapes[index]

    def note_larger(self, name: str) -> None:
        """A call works on more than it was planned for, as batches of one shape may have it whose values differ: the
        next one is planned anew, from itself."""
        if self.schedules.forget(self.engine.in_force):
            warnings.warn(
                f"{name} works on larger tensors than when a batch of this shape was planned, for the forward depends "
                f"on more than shapes: this step may take more memory than it was allowed, and the next one is planned "
                f"anew",
                stacklevel=2,
            )

    @contextmanager
    def forward_of(self, index: int) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """The unit of a call is in its slot and bound (both are given); afterwards the slot is free for the next."""
        op = self.engine.upcoming_call(index, backward=False)
        with self.engine.computing(op) as (slot, views, _), self._buffers.first_time(self.units[op.unit], index):
            yield slot, views

    @contextmanager
    def backward_of(self, index: int) -> Iterator[tuple[torch.Tensor, Gradients | None]]:
        """As `forward_of`, but with where gradients go; operations of calls autograd did not reach are passed over."""
        self._begin_backward()
        op = self.engine.upcoming_call(index, backward=True)
        with self.engine.computing(op) as (slot, _, gradients):
            yield slot, gradients

    def _begin_backward(self, _: object = None) -> None:
        """Backward has reached something that is trained: when it is over, so is this round of the step."""
        if self._phase is not Phase.BACKWARD:
            self._phase = Phase.BACKWARD
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def computed_again(self, index: int) -> AbstractContextManager[None]:
        """What the unit's modules keep is as it was when the call was computed first."""
        return self._buffers.again(index)

    # The user's backward and step #

    def finish(self) -> StepResult:
        """The optimizer step: wait for the list to end, and note which updates the next forward has to make. Raises
        what a lane raised (NonFinite, DiskError)."""
        self.rounds.refuse_incomplete()
        if self._in_step:
            raise UsageError("optimizer.step() came before backward was over: run loss.backward() first")
        engine = self.engine
        if engine.step.own.hypers != self._hypers():
            raise UsageError(
                "the learning rate (or another setting of param_groups) was changed after the forward whose updates it "
                "is for: set it back, call optimizer.step(), and change it before the next forward"
            )
        try:
            self.rounds.traces.append(engine.executor.wait())
        except BaseException:
            self._phase = Phase.FAILED
            self.rest.fail()
            raise
        self.rest.note()
        wary = engine.step.own.sweeping
        self.rest.note_step()
        result = StepResult(engine.step.grad_norm(), wary, tuple(self.rounds.traces))
        self.rounds.start_anew()
        engine.forget_gradients()
        return result

    def drop_gradients(self) -> None:
        """Begin the step under way anew. Raises UsageError where a part of it cannot be dropped any more."""
        rounds = self.rounds
        if rounds.is_complete:
            raise UsageError(
                "optimizer.zero_grad() came between the backward that completes a step, which has begun its updates, "
                "and optimizer.step(): call it after the step, or leave it out"
            )
        if rounds.is_first:
            return
        if self._phase is Phase.FORWARD_OVER and self._is_whole and not self.engine.executor.has_failed:
            raise UsageError(
                "optimizer.zero_grad() came between a forward and its backward, after other backwards of the step: "
                "call it before the forward"
            )
        self.settle()
        rounds.start_anew()
        self.engine.forget_gradients()

    def _end_backward(self) -> None:
        executor = self.engine.executor
        try:
            while (op := executor.upcoming_compute()) is not None:
                if op.call < 0:
                    self.engine.step.fresh.add(op.unit)
                    home = self.store.homes.units[op.unit]
                    home.has_grad |= home.where.states == "device"
                executor.skip_compute(op)
            if not self.rounds.is_last:
                self.rounds.traces.append(executor.wait())
        finally:
            unbind_residents(self.units, self.forwards.residents, self.placeholders)
            self._resident_sums = []
        # Only now: a step that failed is given up by `settle`.
        self._phase = Phase.NONE
        self.rounds.end()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # what is traced cannot raise: this is called when it runs
def _refuse_compiled() -> NoReturn:
    raise UsageError(
        "torch.compile on a model that streams would trace the streaming: compile its blocks in place before "
        "spillway.prepare, as in `for block in model.model.layers: block.compile()`"
    )
