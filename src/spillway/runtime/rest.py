"""What has become of the steps so far: which updates are still due, and whether the store holds a whole step."""

import warnings

from spillway.runtime.engine import Engine
from spillway.runtime.interrupts import uninterrupted
from spillway.runtime.lanes import Due, StepState
from spillway.runtime.rounds import Rounds
from spillway.runtime.schedules import Schedule
from spillway.spec.errors import UsageError, invariant
from spillway.spec.plan import Placement

# A wrong guess costs an update that is dropped, and going over to guessing one that nothing overlaps with.
_CALM_STEPS = 3


class Rest:
    """Brings steps to rest: to their end, or back to the one before."""

    def __init__(self, engine: Engine, rounds: Rounds) -> None:
        self._engine = engine
        self._rounds = rounds
        self.due: Due | None = None  # the last step's updates, where they belong to the next forward
        self._half_done = False  # a failed step has changed what has no other copy
        self._unclipped = 0  # steps in a row whose gradients were not clipped

    @property
    def is_intact(self) -> bool:
        """Whether what rests in the store is the end of a whole step."""
        return not self._half_done

    def is_wary(self, placement: Placement) -> bool:
        """Whether the step to come guesses at nothing (the plan's `wary_ops`)."""
        return placement.speculates and self._unclipped < _CALM_STEPS

    def refuse_half_done(self) -> None:
        """Raise UsageError where the store holds units of two steps."""
        if self._half_done:
            raise UsageError(
                "a step that failed left some units updated and others not: close this model and resume from the last "
                "saved point"
            )

    def refuse_guess(self) -> None:
        """Raise UsageError while a guess at a step may still have to be taken back, or a part of it is made."""
        if self._rounds.is_complete and self._engine.is_running:
            step, plan = self._engine.step, self._engine.in_force.plan
            guesses = (step.may_take_back or plan.placement.mixed_in) and not step.own.sweeping
            # Whether one of them has run yet is a matter of chance.
            if guesses and any(op.kind == "UPDATE" and not op.late for op in plan.ops):
                raise UsageError("backward has run and the step is not finished: call optimizer.step() first")

    def await_lanes(self) -> None:
        """Let a backward's updates come to rest, or what is left of a list that failed or that nobody goes on with."""
        executor = self._engine.executor
        is_left = executor.upcoming_compute() is not None
        if is_left:
            executor.abandon()
        executor.come_to_rest()
        if executor.has_failed or is_left:
            self._half_done |= self._engine.step.is_half_done

    def flush(self) -> None:
        """Carry out the updates that wait for the next forward. Raises what a lane raised."""
        schedule = self._engine.schedule
        if self.due is None or self._half_done or schedule is None:
            return
        self._engine.open(schedule)
        with uninterrupted():
            self._flush(schedule, self.due)

    def _flush(self, schedule: Schedule, due: Due) -> None:
        self._engine.start(schedule.plan.flush_ops, StepState(late=due))
        executor = self._engine.executor
        try:
            self._rounds.traces.append(executor.wait())
        except BaseException:
            executor.abandon()
            self._half_done |= self._engine.step.is_half_done
            self._take_back()
            raise
        finally:
            self.note()

    def run_out(self) -> None:
        """Of a step that is given up: the updates of the one before it."""
        executor = self._engine.executor
        commit = executor.late_commit()
        if commit is not None and self._engine.step.late is not None and not executor.has_failed:
            executor.run_out(commit)

    def abandon(self, in_backward: bool) -> None:
        """The step under way ends here, and what it has written is taken back."""
        executor = self._engine.executor
        executor.abandon()
        self._engine.step.acts.clear()  # device memory that nobody takes away any more
        self._half_done |= self._engine.step.is_half_done
        self._take_back()
        if self._rounds.is_first or in_backward or executor.has_failed:
            if self._rounds.done:
                warnings.warn(
                    f"the {self._rounds.done} backward(s) of this step before the one that failed are dropped with it: "
                    f"the step begins anew",
                    stacklevel=2,
                )
            self._rounds.start_anew()
            self._engine.forget_gradients()

    def fail(self) -> None:
        """A lane has raised at the end of a step, which is given up later."""
        self._rounds.start_anew()
        try:
            self.run_out()
        finally:
            self._engine.executor.abandon()
            self.note()

    def note(self) -> None:
        """Nothing is due any more once it is at rest."""
        if self.due is not None and self._engine.is_running:
            step = self._engine.step
            if step.late is self.due and step.at_rest:
                self.due = None

    def note_step(self) -> None:
        """A step is over: which of its updates belong to the next forward."""
        step, placement = self._engine.step, self._engine.in_force.plan.placement
        due = step.own
        self._unclipped = self._unclipped + 1 if due.scale == 1.0 else 0
        for unit in due.units:
            self._engine.store.homes.units[unit].num_updates += 1
        if step.guessed_wrong:
            self._take_back()
            due.sweeping = True
        if placement.update == "serial":
            return
        if not due.sweeping:
            due.units = {unit for unit in due.units if placement.units[unit].defers}
        if due.sweeping or any(where.defers for where in placement.units):
            due.written = self._engine.store.homes.written
            self.due = due

    def is_up_to_date(self, in_forward: bool) -> bool:
        """Whether weights at rest are those of the last step; waits for that where backward may still come. Not where
        a forward was left half way."""
        executor, step = self._engine.executor, self._engine.step
        commit = executor.late_commit()
        if commit is None or step.late is None or step.at_rest:
            return True
        following = executor.upcoming_compute()
        if following is not None and following.id < commit.id:
            invariant(not in_forward, "a unit that is called without gradients was not seen in the profile")
            return False
        executor.run_out(commit)
        return True

    def _take_back(self) -> None:
        """What the list under way has written is the state of nothing."""
        step, homes = self._engine.step, self._engine.store.homes
        if step.late is not None and step.late is self.due and not step.at_rest:
            homes.forget_written(
                step.late.written
            )  # a step writes nothing of its own before the one before it is at rest
            return
        if not step.may_take_back:
            homes.forget_written()
            return
        try:
            homes.take_back()
        except BaseException:
            self._half_done = True
            raise
