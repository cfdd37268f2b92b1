"""A plan for every shape of batch."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from spillway.model.extrapolate import of_rows, with_works
from spillway.model.profile import CallRecord, CallShape, shapes_of
from spillway.model.work import SLACK
from spillway.runtime.forwards import Batch, Forwards
from spillway.spec.errors import PlanInfeasible, UsageError
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan

# Schedules that are kept, of about a megabyte each: batches may be of any number of lengths.
_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan for batches of one shape."""

    plan: Plan
    profile: ModelProfile
    shapes: tuple[CallShape, ...]


# Makes the plan for a profile; the second argument tells whether units already rest where an earlier plan put them.
Planner = Callable[[ModelProfile, bool], Plan]


class Schedules:
    """Profiles each new shape of batch once, and has it planned."""

    def __init__(
        self,
        forwards: Forwards,
        planner: Planner,
        micro_batch: int | None,
        is_open: Callable[[], bool],
    ) -> None:
        """`is_open`: whether weights are at rest."""
        self._forwards = forwards
        self._planner = planner
        self._micro_batch = micro_batch
        self._is_open = is_open
        self._known: dict[Hashable, Schedule] = {}
        self._outgrown: dict[Hashable, int] = {}  # elements that the largest schedule so far was made for, by its key

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """The schedule for batches like this one. Raises UsageError and PlanInfeasible."""
        batch = self._forwards.batch(args, kwargs)
        schedule = self._known.pop(batch.key, None) or self._make(batch)
        self._known[batch.key] = schedule
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]  # the one that was asked for longest ago
        return schedule

    def forget(self, schedule: Schedule) -> bool:
        """Make the next schedule for its batches from the batch at hand. False where that was done and gave none for
        more than before."""
        key = next((key for key, known in self._known.items() if known is schedule), None)
        elements = sum(shape.elements for shape in schedule.shapes)
        if key is None or elements <= self._outgrown.get(key, -1):
            return False
        self._outgrown[key] = elements
        del self._known[key]
        return True

    def drop_all(self) -> None:
        """Make the next schedule of every batch anew."""
        self._known.clear()

    def _make(self, batch: Batch) -> Schedule:
        cut = self._micro_batch if self._micro_batch is not None and self._micro_batch < batch.rows else None
        try:
            return self._planned(batch, cut)
        except PlanInfeasible as error:
            smaller = self._cut_that_fits(batch, cut or batch.rows)
            if smaller is None:
                raise
            fewer = f"micro_batch={smaller} (--per-device-train-batch-size {smaller}) fits"
            raise PlanInfeasible(f"{error}, and {fewer}", error.smallest) from error

    def _cut_that_fits(self, batch: Batch, rows: int) -> int | None:
        """So many rows of the batch at a time, fewer than `rows`; None where that does not help either."""
        while batch.tensors and rows > 1:
            rows = -(-rows // 2)
            try:
                self._planned(batch, rows)
            except PlanInfeasible:
                continue
            except Exception:  # it cannot be cut, or its forward takes no other number of rows: nothing to advise
                return None
            return rows
        return None

    def _planned(self, batch: Batch, cut: int | None) -> Schedule:
        """With so many rows of the batch at a time inside each unit."""
        calls, shapes, beside = self._observe(batch, cut) if batch.tensors else ([], (), False)
        profile = replace(self._forwards.profile(batch, calls, shapes, SLACK), calls_beside=beside)
        return Schedule(self._planner(profile, self._is_open()), profile, shapes)

    def _observe(self, batch: Batch, cut: int | None) -> tuple[list[CallRecord], tuple[CallShape, ...], bool]:
        """The calls of a forward, and whether others are made besides."""
        try:
            calls = self._forwards.fake(batch)
            grown = None if cut is None else self._forwards.grown(batch)
        except UsageError:
            raise
        except Exception:  # it depends on values; an error of the model itself comes out of what follows, too
            if cut is not None:
                return self._observe_parts(batch, cut)
            calls, grown = self._forwards.real(batch), None
        return calls, shapes_of(calls, grown, batch.rows, cut), self._forwards.calls_beside

    def _observe_parts(self, batch: Batch, cut: int) -> tuple[list[CallRecord], tuple[CallShape, ...], bool]:
        """What `_observe` gives, of a forward that depends on values, for which there may be no memory but in
        micro-batches: told from one of them, and from that with a row more."""
        few, one_more = map(self._forwards.real, self._forwards.parts(batch, cut))
        calls = of_rows(few, one_more, cut, batch.rows)
        shapes = shapes_of(calls, of_rows(few, one_more, cut, batch.rows + 1), batch.rows, cut)
        return with_works(calls, shapes, cut, batch.rows), shapes, self._forwards.calls_beside
