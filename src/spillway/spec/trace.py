"""What a step did, measured by the runtime's recorder or predicted by the simulator: the same type."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on its lane; seconds since the start of the step."""

    op: int
    kind: str
    lane: str
    unit: int
    group: str
    start_s: float
    end_s: float
    amount: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of one step with their times, and the seconds from its begin to its end."""

    spans: tuple[Span, ...]
    seconds: float

    def busy_s(self) -> dict[str, float]:
        """Seconds each lane worked."""
        busy: dict[str, float] = {}
        for span in self.spans:
            busy[span.lane] = busy.get(span.lane, 0.0) + span.end_s - span.start_s
        return busy

    def moved_bytes(self) -> dict[str, float]:
        """Bytes moved by each lane that moves bytes."""
        moved: dict[str, float] = {}
        for span in self.spans:
            if span.lane in ("upload", "download", "read", "write"):
                moved[span.lane] = moved.get(span.lane, 0.0) + span.amount
        return moved


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did: the global norm of its gradients before clipping, whether it waited for that norm
    (by the plan's `wary_ops`), and a trace for each of its lists. `skipped`: it was not made, for this `reason`."""

    grad_norm: float = math.nan
    wary: bool = False
    traces: tuple[Trace, ...] = ()
    skipped: bool = False
    reason: str = ""
