"""Forwards that no backward follows (evaluation, generation, a teacher): units stream through the slots of the step."""

from collections.abc import Callable
from dataclasses import dataclass

from spillway.plan.lower import lower_forward
from spillway.runtime.executor import Executor
from spillway.runtime.interrupts import uninterrupted
from spillway.runtime.schedules import Schedule
from spillway.spec.plan import Op


@dataclass(frozen=True, slots=True)
class _Listed:
    """The list of a plan and an order of units."""

    schedule: Schedule
    order: tuple[int, ...]
    ops: tuple[Op, ...]


class ForwardOnly:
    """Learns in which order the forward calls its units, and has them fetched ahead in every forward after that.

    The first forward, and one that turns out to call others, fetches each unit when it is called.
    """

    def __init__(self) -> None:
        self._executor: Executor | None = None  # while a list runs
        self._order: tuple[int, ...] = ()  # of the last whole forward
        self._called: list[int] = []
        self._listed: _Listed | None = None

    def begin(self, executor: Executor, schedule: Schedule, start: Callable[[tuple[Op, ...]], None]) -> None:
        """A forward has begun; `start` runs a list."""
        self.give_up()
        self._called = []
        if self._order:
            with uninterrupted():
                start(self._list(schedule))
                self._executor = executor

    def next_op(self, unit: int) -> Op | None:
        """The operation of a unit that is called now; None where it has to be fetched by itself."""
        self._called.append(unit)
        if self._executor is None:
            return None
        op = self._executor.upcoming_compute()
        if op is None or op.unit != unit:
            self.give_up()
            return None
        return op

    def end(self, is_whole: bool) -> None:
        """The forward is over, or has failed. Raises what a lane raised."""
        executor = self._executor
        if executor is not None and executor.upcoming_compute() is None:
            self._executor = None
            try:
                executor.join()  # lanes alone: the device may still compute while the next forward begins
            except BaseException:
                executor.abandon()
                raise
        self.give_up()
        if is_whole:
            self._order = tuple(self._called)

    def give_up(self) -> None:
        """End the list under way, if there is one."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.abandon()

    def _list(self, schedule: Schedule) -> tuple[Op, ...]:
        listed = self._listed
        if listed is None or listed.schedule is not schedule or listed.order != self._order:
            plan = schedule.plan
            ops = lower_forward(schedule.profile, plan.placement, plan.pools, self._order)
            self._listed = listed = _Listed(schedule, self._order, ops)
        return listed.ops
