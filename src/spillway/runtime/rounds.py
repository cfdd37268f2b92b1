"""How many backwards make an optimizer step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spillway.spec.errors import UsageError
from spillway.spec.trace import Trace


@dataclass(slots=True)
class Rounds:
    """Counts forwards and backwards of the optimizer step under way. `per_step`: as many as the plan was made for."""

    per_step: int
    completes: bool | None = None  # whether backwards of forwards that begin now complete a step; None: by their count
    done: int = 0
    is_complete: bool = False  # the next thing is the optimizer step
    is_last: bool = False  # the backward to come completes it
    traces: list[Trace] = field(default_factory=list)  # of its lists that are over
    _is_told: bool = False  # which backwards only accumulate, in this step or one before

    @contextmanager
    def saying(self, completes: bool) -> Iterator[None]:
        """Whether backwards of forwards inside complete the step, whatever their count."""
        before, self.completes = self.completes, completes
        try:
            yield
        finally:
            self.completes = before

    @property
    def is_first(self) -> bool:
        """Whether the backward to come is the first of the step."""
        return self.done == 0

    def refuse_more(self) -> None:
        """Raise UsageError for a forward that comes before the optimizer step."""
        if self.is_complete:
            raise UsageError(
                f"backward ran {self.done} time(s) and the weights are updated with it: call optimizer.step() "
                f"before the next forward, or pass gradient_accumulation_steps= to prepare"
            )

    def refuse_incomplete(self) -> None:
        """Raise UsageError for an optimizer step that comes too early."""
        if not self.is_complete:
            raise UsageError(
                f"optimizer.step() came after {self.done} of {self.per_step} backward call(s): run loss.backward() "
                f"first, as often as gradient_accumulation_steps says, or, where steps have fewer, all but their last "
                f"forward and backward within spillway.no_sync(model)"
            )

    def begin(self) -> None:
        """A forward begins. Its backward is the last where that was said, and otherwise by count, or, once the
        user has said which ones only accumulate, as the first that does not. Raises UsageError where the plan cannot
        accumulate."""
        if self.completes is False and self.per_step == 1:
            raise UsageError("no_sync needs gradient_accumulation_steps= of 2 or more in prepare")
        self._is_told |= self.completes is False
        by_count = self._is_told or self.done + 1 >= self.per_step
        self.is_last = by_count if self.completes is None else self.completes

    def end(self) -> None:
        """A backward has run."""
        self.done += 1
        self.is_complete = self.is_last

    def start_anew(self) -> None:
        """The optimizer step is over, or was given up."""
        self.done, self.is_complete = 0, False
        self.traces = []
