"""What the planning and examining commands answer."""

from dataclasses import dataclass, field

from spillway.spec.hardware import Budget
from spillway.spec.plan import TierPeaks


@dataclass(frozen=True, slots=True)
class Help:
    """Something that would make the step faster. `gain` 0.25: a quarter more tokens per second."""

    change: str
    gain: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The answer. Bytes, seconds, FLOP/s; where it does not fit the figures of a step are 0 and `problem` says why."""

    model: str
    machine: str
    num_params: int
    tokens: int  # per step
    fits: bool
    problem: str
    budget: Budget
    peaks: TierPeaks
    rows: int = 0  # a step
    micro_rows: int = 0  # computed at a time inside a unit
    streams: int = 1  # micro-batches of these rows side by side
    policy: str = "auto"
    phases: dict[str, TierPeaks] = field(default_factory=dict)  # load, step, evaluation, save, export
    step_seconds: float = 0.0
    clipped_step_seconds: float = 0.0  # of one whose gradients are clipped; 0 where it takes no longer
    tokens_per_s: float = 0.0  # this and what follows where no gradients are clipped
    model_flops_per_s: float = 0.0
    peak_share: float = 0.0  # of what the device's maker promises
    bottleneck: str = ""
    busy_share: dict[str, float] = field(default_factory=dict)  # per lane
    update: str = ""
    deferred_units: int = 0  # whose updates are left to the next forward, where others overlap backward
    placement: dict[str, dict[str, int]] = field(default_factory=dict)  # weights and states: units per tier
    written_bytes: float = 0.0  # a step
    run_steps: int = 0
    run_seconds: tuple[float, float] = (0.0, 0.0)  # from no step clipped to all of them, and as far as one can be off
    run_written_bytes: float = 0.0
    endurance_share: float = 0.0  # of the drives', by the whole run
    dollars_per_million_tokens: tuple[float, float] = (0.0, 0.0)  # as far apart as those
    dollars_per_run: tuple[float, float] = (0.0, 0.0)
    activations: dict[str, int] = field(default_factory=dict)  # calls per way to keep what backward needs
    notes: tuple[str, ...] = ()
    helps: tuple[Help, ...] = ()


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run has done so far. Bytes and seconds; figures of a step are of the ordinary one, the median."""

    run: str
    model: str
    optim: str
    update: str
    steps: int
    total_steps: int  # that it is to make; 0 where its metrics do not say
    skipped_steps: int
    first_loss: float
    recent_loss: float  # mean of the last steps
    recent_steps: int
    held_out: tuple[float, float] | None  # the first and the last loss of held-out data
    tokens: int  # of all steps
    tokens_per_s: float
    step_seconds: float
    slow_step_seconds: float  # one in twenty takes as long or longer
    predicted_step_seconds: float
    predicted_clipped_step_seconds: float  # of one whose gradients are clipped; 0 where it takes no longer
    seconds: float  # of all steps
    seconds_left: float  # at the pace of the ordinary step
    busy_share: dict[str, float]  # per lane
    read_bytes: float  # a step
    written_bytes: float  # a step
    written_in_all: dict[str, int]  # to each drive
    peaks: dict[str, int]  # per tier
    predicted_peaks: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `fix` is empty where there is nothing to mend."""

    what: str
    found: str
    fix: str = ""
