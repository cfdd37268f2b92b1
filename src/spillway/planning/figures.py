"""What a plan promises: figures, and a picture of the step."""

from dataclasses import dataclass, replace

from spillway.plan.memory import phase_peaks
from spillway.plan.occupancy import occupancy
from spillway.plan.simulate import simulate
from spillway.planning.question import Question, hardware_for, rate_share
from spillway.spec.answers import PlanReport
from spillway.spec.errors import PlanInfeasible
from spillway.spec.machine import Machine
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Kept, Plan, TierPeaks
from spillway.spec.sizes import format_size
from spillway.spec.trace import Trace

# A prediction from catalogue figures is not worth more than this; from measured ones half of it.
_SPREAD_CATALOGUE, _SPREAD_MEASURED = 0.25, 0.12
_SECONDS_OF_OWNERSHIP = 3 * 365 * 24 * 3600  # a machine is paid for in three years


def report_on(question: Question) -> PlanReport:
    """Plan and predict."""
    try:
        plan = question.plan(question.machine, question.profile())
    except PlanInfeasible as error:
        return replace(_known(question), problem=str(error), peaks=error.smallest)
    return figures(question, plan)


def _saved_bytes(profile: ModelProfile, plan: Plan) -> int:
    """What a saved point writes besides what steps do: trained weights and states that rest in memory."""
    if not plan.placement.keep.last:
        return 0
    pairs = zip(profile.units, plan.placement.units, strict=True)
    return sum(unit.updated_bytes for unit, where in pairs if unit.num_trainable and where.states != "disk")


def _dollars(machine: Machine, seconds: float, written: float) -> float:
    """Of so many seconds, in which so many bytes are written: the device's price over three years of use, and what is
    worn of the drives (where their endurance is known; otherwise they are paid for by time, too). No power, no other
    part of the machine. 0 where a price is unknown."""
    on_drives = sum(drive.price for drive in machine.drives)
    by_time = machine.price
    worn = 0.0
    if machine.endurance_bytes:
        by_time -= on_drives if machine.price else 0.0
        worn = on_drives * written / machine.endurance_bytes if machine.price else 0.0
    return by_time / _SECONDS_OF_OWNERSHIP * seconds + worn


def figures(question: Question, plan: Plan) -> PlanReport:
    """What a plan promises."""
    base, machine, profile = _known(question), question.machine, question.profile()
    trace = simulate(plan.ops, plan.pools, hardware_for(machine, profile))
    flops = sum(call.flops + profile.backward_flops(call) for call in profile.calls)
    spread = _SPREAD_MEASURED if question.measured else _SPREAD_CATALOGUE
    slowest = max(plan.step_seconds, plan.wary_step_seconds)
    steps = (1 - spread) * plan.step_seconds, (1 + spread) * slowest
    tokens_per_s = base.tokens / plan.step_seconds
    endurance = machine.endurance_bytes
    phases = phase_peaks(profile, plan, base.budget.process_bytes, machine.hardware.device == "cpu")
    saved, every = _saved_bytes(profile, plan) if machine.disk_bytes else 0, question.options.save_steps
    run_written = plan.bytes_written * question.steps + saved * -(-question.steps // every)
    written = plan.bytes_written + saved / every
    low, high = (_dollars(machine, seconds, written) for seconds in steps)
    tokens = base.tokens / 1e6
    peak = machine.peak_flops_per_s * rate_share(machine, profile)
    return replace(
        base,
        fits=True,
        peaks=plan.peaks,
        phases=phases,
        step_seconds=plan.step_seconds,
        clipped_step_seconds=slowest if slowest > plan.step_seconds else 0.0,
        tokens_per_s=tokens_per_s,
        model_flops_per_s=flops / plan.step_seconds,
        peak_share=flops / plan.step_seconds / peak if peak else 0.0,
        bottleneck=plan.bottleneck,
        busy_share={lane: busy / trace.seconds for lane, busy in trace.busy_s().items()},
        update=plan.placement.update,
        deferred_units=plan.placement.mixed_in,
        streams=plan.placement.streams,
        placement={
            part: _count([getattr(where, part) for where in plan.placement.units]) for part in ("weights", "states")
        },
        written_bytes=plan.bytes_written,
        run_seconds=(question.steps * steps[0], question.steps * steps[1]),
        run_written_bytes=run_written,
        endurance_share=run_written / endurance if endurance else 0.0,
        dollars_per_million_tokens=(low / tokens, high / tokens) if tokens else (0.0, 0.0),
        dollars_per_run=(low * question.steps, high * question.steps),
        activations=_count([_kept_as(kept) for kept in plan.placement.acts]),
        notes=(*plan.notes, *_notes_on_saving(phases["save"].disk, base.budget.disk_bytes)),
    )


def _notes_on_saving(needed: int, there: int) -> list[str]:
    """Where steps fit and the trained model beside them does not."""
    if needed <= there:
        return []
    return [
        f"the trained model needs {format_size(needed - there)} more of disk than there is beside the store: let "
        f"--output-dir be on another drive"
    ]


def _kept_as(kept: Kept) -> str:
    """In words."""
    what = "all" if kept.everything else "inputs and tape" if kept.tape else "inputs"
    return f"{what} on {kept.tier}"


def _count(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _known(question: Question) -> PlanReport:
    """What the answer is about."""
    options, profile = question.options, question.profile()
    return PlanReport(
        options.model,
        question.machine.name,
        sum(unit.num_params for unit in profile.units),
        profile.tokens,
        False,
        "",
        question.budget(question.machine),
        TierPeaks(0, 0, 0),
        options.per_device_train_batch_size * options.gradient_accumulation_steps,
        options.per_device_train_batch_size,
        policy=options.policy,
        run_steps=question.steps,
    )


@dataclass(frozen=True, slots=True)
class Picture:
    """A predicted step. `memory`: per tier, seconds since its begin and bytes from then on."""

    trace: Trace
    memory: dict[str, list[tuple[float, int]]]
    unit_names: list[str]


def picture(question: Question) -> Picture:
    """The predicted step. Raises PlanInfeasible."""
    profile = question.profile()
    plan = question.plan(question.machine, profile)
    trace = simulate(plan.ops, plan.pools, hardware_for(question.machine, profile))
    return Picture(trace, occupancy(plan, plan.ops, trace), [unit.name for unit in profile.units])
