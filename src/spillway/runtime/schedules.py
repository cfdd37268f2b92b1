"""A plan for every shape of batch."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spillway.model.profile import CallRecord, CallShape, shapes_of
from spillway.model.work import SLACK
from spillway.runtime.forwards import Batch, Forwards
from spillway.spec.errors import UsageError
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
        model: nn.Module,
        forwards: Forwards,
        planner: Planner,
        micro_batch: int | None,
        is_open: Callable[[], bool],
    ) -> None:
        """`is_open`: whether weights are at rest."""
        self._name = type(model).__name__
        self._forwards = forwards
        self._planner = planner
        self._micro_batch = micro_batch
        self._is_open = is_open
        self._known: dict[Hashable, Schedule] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """The schedule for batches like this one. Raises UsageError and PlanInfeasible."""
        batch = self._forwards.batch(args, kwargs)
        schedule = self._known.pop(batch.key, None) or self._make(batch)
        self._known[batch.key] = schedule
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]  # the one that was asked for longest ago
        return schedule

    def _make(self, batch: Batch) -> Schedule:
        calls, shapes, beside = self._observe(batch) if batch.tensors else ([], (), False)
        profile = replace(self._forwards.profile(batch, calls, shapes, SLACK), calls_beside=beside)
        return Schedule(self._planner(profile, self._is_open()), profile, shapes)

    def _observe(self, batch: Batch) -> tuple[list[CallRecord], tuple[CallShape, ...], bool]:
        """The calls of a forward, and whether others are made besides."""
        is_cut = self._micro_batch is not None and self._micro_batch < batch.rows
        try:
            calls = self._forwards.fake(batch)
            grown = self._forwards.grown(batch) if is_cut else None
        except UsageError:
            raise
        except Exception as error:
            calls, grown = self._forwards.real(batch), None  # an error of the model itself comes out of this
            if is_cut:
                raise UsageError(
                    f"the forward of {self._name} cannot be run on tensors without content ({error}), as one that "
                    f"depends on their values cannot, so it cannot be cut into micro-batches: leave micro_batch out"
                ) from error
        shapes = shapes_of(calls, grown, batch.rows, self._micro_batch)
        return calls, shapes, self._forwards.calls_beside
