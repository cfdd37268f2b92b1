"""From a request to a plan: the best that the search finds, as many saved points as there is room for, and notes."""

import gc
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from spillway.plan.candidates import Candidate, Candidates
from spillway.plan.check import check
from spillway.plan.fill import Filler
from spillway.plan.lower import complete, lower_step
from spillway.plan.pools import stored_bytes
from spillway.plan.request import PlanRequest, space_of
from spillway.plan.search import Search, Timed, first_mode
from spillway.plan.simulate import step_seconds
from spillway.plan.start import Start
from spillway.plan.swap import outputs
from spillway.spec.errors import PlanInfeasible, UsageError, required
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import IN_PLACE, KeepPoints, Plan
from spillway.spec.sizes import counted, format_size


def make_plan(model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest) -> Plan:
    """The plan that training executes.

    Raises PlanInfeasible naming the tier that is short and the smallest budget that works, UsageError where forced
    choices contradict each other.
    """
    problem: PlanInfeasible | None = None  # of what needs least
    with _uncollected():
        for asked in _with_fewer_points(request):
            try:
                plan = _make_plan(model, hardware, budget, asked)
            except PlanInfeasible as error:
                problem = error
                continue
            return plan if asked.keep == request.keep else replace(plan, notes=(*plan.notes, *_on_fewer(asked.keep)))
    raise required(problem, "a request that asks for nothing")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of reference cycles: lists of operations have none, and it would walk them over and over,
    which is half of the time that a long one takes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_fewer_points(request: PlanRequest) -> Iterator[PlanRequest]:
    """As asked for; and where the drives have no room for that, with fewer and fewer saved points, in the end with
    steps made in place: not once a run has a point that must stay."""
    yield request
    if not request.has_store or request.fixed is not None:
        return
    for last in range(request.keep.last - 1, 0, -1):
        yield replace(request, keep=replace(request.keep, last=last))
    if request.goes_on:
        return
    if request.keep.last:
        yield replace(request, keep=IN_PLACE)
    if request.keep.last or request.keep.of_memory:
        yield replace(request, keep=replace(IN_PLACE, of_memory=False))


def _on_fewer(keep: KeepPoints) -> list[str]:
    """Steps in place have a note of their own."""
    return [f"the drives have room for {counted(keep.last, 'saved point')}, not more"] if keep.last else []


def _make_plan(model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest) -> Plan:
    space = space_of(request)
    if request.streams is not None and request.streams > 1 and hardware.device == "cpu":
        raise UsageError("a CPU computes each micro-batch on all its cores: leave streams out, which are a GPU's")
    if not model.calls:
        budget = _before_calls_are_known(model, hardware, budget)
    best = Search(model, hardware, budget, request, space).run()
    return _finished(model, hardware, request, best)


def _finished(model: ModelProfile, hardware: HardwareSpec, request: PlanRequest, timed: Timed) -> Plan:
    """With all that training and the user read of it."""
    plan = complete(model, timed.plan)
    check(plan)
    return replace(
        plan,
        step_seconds=timed.seconds,
        wary_step_seconds=step_seconds(plan, hardware, wary=True)[0] if plan.wary_ops else 0.0,
        bottleneck=timed.bottleneck,
        peaks=timed.candidate.peaks,
        notes=_notes(model, timed.candidate, request),
    )


def fits(model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest) -> bool:
    """Whether there is any plan; takes far less than making one."""
    space = space_of(request)
    for asked in _with_fewer_points(request):
        try:
            Start(Candidates(model, hardware, budget, asked, space)).smallest(first_mode(space))
        except PlanInfeasible:
            continue
        return True
    return False


def swapped_plans(
    model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest, points: int = 9
) -> list[tuple[float, Plan]]:
    """The plan that recomputes, with more and more activations moved off the device in the order of LoHan's algorithm
    1: bytes moved besides inputs of units, and the plan. Raises PlanInfeasible."""
    start = make_plan(model, hardware, budget, replace(request, activations="recompute"))
    space = space_of(request)
    candidates = Candidates(model, hardware, budget, replace(request, fixed=start.placement), space)
    ordered = outputs(model, start.placement.acts, space.keeps)
    ends = list(accumulate(output.num_bytes for output in ordered))
    found: dict[float, Plan] = {}
    for point in range(points):
        chosen = ordered[: bisect_right(ends, ends[-1] * point // (points - 1)) if ends else 0]
        candidate = Filler(candidates).moved(candidates.of(start.placement), chosen)
        plan = lower_step(model, candidate.placement)
        timed = Timed(candidate, plan, *step_seconds(plan, hardware))
        pairs = zip(model.calls, candidate.placement.acts, strict=True)
        moved = sum(stored_bytes(call, kept) - call.act_bytes for call, kept in pairs if kept.tier != "device")
        found[moved] = _finished(model, hardware, request, timed)
    return sorted(found.items())


def _before_calls_are_known(model: ModelProfile, hardware: HardwareSpec, budget: Budget) -> Budget:
    """Half of what is left stays for activations; of the host's only where they may come to lie there."""
    ours = budget.host_bytes - budget.process_bytes
    if hardware.device == "cpu" or any(unit.num_trainable for unit in model.units):
        ours //= 2
    return replace(budget, device_bytes=budget.device_bytes // 2, host_bytes=budget.process_bytes + ours)


def _notes(model: ModelProfile, candidate: Candidate, request: PlanRequest) -> tuple[str, ...]:
    notes = []
    placement = candidate.placement
    if request.has_store and not placement.keep.last:
        may_stop = placement.keep.of_memory or all(where.states in ("disk", "none") for where in placement.units)
        stopped = "a run that is stopped goes on, and a crash" if may_stop else "a stop or a crash"
        notes.append(
            "no saved points, the drives hold one copy that each step overwrites: the model is written every "
            f"save_steps, {stopped} loses the optimizer states"
        )
    elif request.has_store and any(where.states in ("host", "device") for where in placement.units):
        notes.append("some optimizer states rest in memory: saved points are save_steps apart")
    if any(where.grads == "disk" for where in placement.units if where.states != "none"):
        why = "are summed" if placement.accumulation > 1 else "wait for the global norm"
        less = "" if placement.accumulation > 1 or not placement.clip else ", or no clipping,"
        notes.append(f"gradients {why} on disk: more host memory{less} avoids that")
    pairs = zip(model.calls, placement.acts, strict=True)
    moved = sum(stored_bytes(call, kept) for call, kept in pairs if kept.tier == "disk")
    if moved:
        notes.append(f"{format_size(moved)} of activations pass over the drives in every forward and backward")
    return tuple(notes)
