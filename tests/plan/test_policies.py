"""Our planner against those of the field, against every placement there is, and against more of everything."""

import dataclasses
import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plan import profiles
from sampling import examples
from spillway.hardware.catalogue import find_machine
from spillway.plan.bounds import phases
from spillway.plan.candidates import Candidates
from spillway.plan.lower import lower_step
from spillway.plan.make import make_plan
from spillway.plan.policies import POLICIES
from spillway.plan.request import PlanRequest, space_of
from spillway.plan.simulate import step_seconds
from spillway.plan.start import Start
from spillway.plan.swap import outputs, step_curve
from spillway.spec.errors import PlanInfeasible, UsageError
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Kept, Placement, Plan, UnitPlacement

# The search stops at a plan that none can beat by more than 1 %.
CLOSE = 1.011
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # a counterexample takes minutes to shrink
RATES = (
    "device_flops_per_s", "upload_bytes_per_s", "download_bytes_per_s", "read_bytes_per_s", "write_bytes_per_s",
    "update_params_per_s", "host_bytes_per_s", "device_update_params_per_s",
)  # fmt: skip


@st.composite
def machines(draw: st.DrawFn) -> HardwareSpec:
    """A device and what hangs on it: rates within two orders of magnitude."""

    def rate(low: float, high: float) -> float:
        return 10 ** draw(st.floats(low, high))

    update = rate(8.5, 10)
    return HardwareSpec(
        "cuda", rate(12, 15), rate(9, 11), rate(9, 11), rate(8.5, 10.5), rate(8.5, 10.5), update, rate(10, 11.5), False,
        draw(st.floats(0.4, 1)), update * draw(st.floats(10, 40)),
    )  # fmt: skip


@st.composite
def chains(draw: st.DrawFn) -> ModelProfile:
    """Transformers of any width and batch."""
    return profiles.chain(
        draw(st.integers(1, 6)), 4096 * draw(st.integers(1, 400)), 4096 * draw(st.integers(1, 2000)),
        draw(st.booleans()), 10 ** draw(st.floats(7, 11.5)),
    )  # fmt: skip


@st.composite
def questions(draw: st.DrawFn) -> tuple[ModelProfile, HardwareSpec, Budget, bool]:
    """A model, a machine and a budget between too little and plenty."""
    model = draw(chains())
    total = sum(unit.weight_bytes + unit.state_bytes for unit in model.units)
    device, host = (int(total * draw(st.floats(0.1, most)) + least) for most, least in ((2, 4e7), (3, 6e7)))
    return model, draw(machines()), Budget(device, host, 10**13, 10**6), draw(st.booleans())


def plan(model: ModelProfile, machine: HardwareSpec, budget: Budget, clip: bool, policy: str = "auto") -> Plan | None:
    try:
        return make_plan(model, machine, budget, PlanRequest(clip=clip, policy=policy))
    except PlanInfeasible:
        return None


@settings(max_examples=examples(25), deadline=None, phases=UNSHRUNK, derandomize=True)
@given(questions())
def test_ours_is_never_slower_than_any_policy_and_fits_wherever_one_does(
    question: tuple[ModelProfile, HardwareSpec, Budget, bool],
) -> None:
    ours = plan(*question)
    for name in POLICIES:
        theirs = plan(*question, name)
        if theirs is not None:
            assert ours is not None, f"{name} fits where ours does not"
            assert ours.step_seconds <= CLOSE * theirs.step_seconds, name


@settings(max_examples=examples(6), deadline=None, phases=UNSHRUNK, derandomize=True)
@given(st.integers(25, 60), st.integers(100, 40_000), st.integers(1, 40_000), st.floats(9, 13.5), machines(),
       st.floats(0.03, 1.2), st.floats(0.1, 2), st.booleans())  # fmt: skip
def test_nor_for_large_models(
    blocks: int, pages: int, act_pages: int, flops: float, machine: HardwareSpec, device: float, host: float, clip: bool
) -> None:
    model = profiles.chain(blocks, 4096 * pages, 4096 * act_pages, flops=10**flops)
    total = sum(unit.weight_bytes + unit.state_bytes for unit in model.units)
    budget = Budget(int(device * total) + 10**9, int(host * total) + 10**9, 10**14, 10**6)
    ours = plan(model, machine, budget, clip)
    for name in POLICIES:
        theirs = plan(model, machine, budget, clip, name)
        assert theirs is None or (ours and ours.step_seconds <= 1.02 * theirs.step_seconds), name


@settings(max_examples=examples(30), deadline=None, phases=UNSHRUNK, derandomize=True)
@given(questions(), st.sampled_from(RATES), st.floats(1.1, 4))
def test_a_faster_part_never_makes_the_plan_slower(
    question: tuple[ModelProfile, HardwareSpec, Budget, bool], rate: str, factor: float
) -> None:
    model, machine, budget, clip = question
    before = plan(*question)
    faster = dataclasses.replace(machine, **{rate: factor * getattr(machine, rate)})
    after = plan(model, faster, budget, clip)
    if before is not None:
        assert after is not None
        assert after.step_seconds <= CLOSE * before.step_seconds


@settings(max_examples=examples(30), deadline=None, phases=UNSHRUNK, derandomize=True)
@given(questions(), st.sampled_from(("device_bytes", "host_bytes")), st.floats(1.1, 4))
def test_more_memory_never_makes_the_plan_slower(
    question: tuple[ModelProfile, HardwareSpec, Budget, bool], tier: str, factor: float
) -> None:
    model, machine, budget, clip = question
    before = plan(*question)
    after = plan(model, machine, dataclasses.replace(budget, **{tier: int(factor * getattr(budget, tier))}), clip)
    if before is not None:
        assert after is not None
        # What settles nearer leaves other bubbles: nearly never slower.
        assert after.step_seconds <= 1.1 * before.step_seconds


@settings(max_examples=examples(25), deadline=None, phases=UNSHRUNK, derandomize=True)
@given(questions(), st.floats(0.1, 10))
def test_time_has_one_unit(question: tuple[ModelProfile, HardwareSpec, Budget, bool], factor: float) -> None:
    """Rates that are all so many times higher make work that is as many times larger take the same time."""
    _, machine, _, _ = question
    found = plan(*question)
    if found is None:
        return
    rates = {rate: factor * getattr(machine, rate) for rate in RATES}
    faster = dataclasses.replace(machine, **rates)
    ops = tuple(op._replace(amount=factor * op.amount) for op in found.ops)
    seconds, _ = step_seconds(dataclasses.replace(found, ops=ops), faster)
    assert seconds == pytest.approx(found.step_seconds, rel=1e-6)


@settings(max_examples=examples(100), deadline=None)
@given(chains(), machines(), st.integers(0, 1 << 28))
def test_step_time_is_convex_in_the_bytes_that_are_swapped(
    model: ModelProfile, machine: HardwareSpec, room: int
) -> None:
    units = tuple(UnitPlacement("disk", "disk", "host") for _ in model.units)
    placement = Placement(units, (Kept("host"),) * len(model.calls), "overlap", False, 1, 2, 2, 1 << 24)
    forward, backward = phases(model, placement)
    ordered = outputs(model, placement.acts, ("tape", "everything"))
    assert [output.benefit for output in ordered] == sorted((output.benefit for output in ordered), reverse=True)
    curve = step_curve(forward, backward, [output for output in ordered if output.num_bytes], machine, room)
    slopes = [(t2 - t1) / (a2 - a1) for (a1, t1), (a2, t2) in itertools.pairwise(curve) if a2 > a1]
    for slope, following in itertools.pairwise(slopes):
        assert following >= slope - 1e-9 * max(abs(slope), 1e-12) - 1e-15


@pytest.mark.sampled(3)
@pytest.mark.parametrize("clip", (False, True))
@pytest.mark.parametrize("flops", (1e8, 1e11))
@pytest.mark.parametrize("host", (70, 130))
def test_ours_finds_what_trying_everything_finds(clip: bool, flops: float, host: int) -> None:
    model = profiles.chain(1, elements=1 << 20, act_bytes=1 << 20, flops=flops)
    machine, budget = profiles.MACHINE, Budget(40 << 20, host << 20, 10**12, 10**6)
    request = PlanRequest(clip=clip)
    ours = make_plan(model, machine, budget, request)
    candidates = Candidates(model, machine, budget, request, space_of(request))
    start = Start(candidates).deepest("overlap").placement
    rests = [("disk", "disk"), ("host", "disk"), ("host", "host"), ("disk", "host"), ("device", "host"),
             ("device", "disk"), ("device", "device")]  # fmt: skip
    keeps = [Kept("device"), Kept("host"), Kept("disk"), Kept("device", everything=True)]
    best = float("inf")
    for where, kept, update in itertools.product(
        itertools.product(rests, repeat=3), keeps, ("overlap", "deferred", "serial")
    ):
        units = tuple(UnitPlacement(w, s, "device" if s == "device" else "host") for w, s in where)
        acts = tuple(kept if call.kind == "FORWARD" else Kept(kept.tier) for call in model.calls)
        found = candidates.of(dataclasses.replace(start, units=units, acts=acts, update=update))
        if candidates.fits(found):
            best = min(best, step_seconds(lower_step(model, found.placement), machine)[0])
    assert ours.step_seconds <= CLOSE * best


@pytest.mark.parametrize("blocks", (1, 4))
def test_policies_hold_what_they_stand_for(blocks: int) -> None:
    model, machine = profiles.chain(blocks, flops=1e10), profiles.MACHINE
    budget = Budget(10**8, 10**9, 10**13, 10**7)
    for name, policy in POLICIES.items():
        try:
            made = make_plan(model, machine, budget, PlanRequest(policy=name))
        except PlanInfeasible:
            continue
        units, acts = made.placement.units, made.placement.acts
        assert {unit.weights for unit in units} <= {*policy.weights}, name
        assert {unit.states for unit in units} <= {*policy.states, "none"}, name
        assert {unit.grads for unit in units if unit.states != "device"} <= {*policy.grads}, name
        assert made.placement.update in policy.updates, name
        if policy.must_keep:
            assert all(kept.everything for kept in acts[:-1]), name
        if not policy.keeps:
            assert not any(kept.everything or kept.tape for kept in acts), name
        assert all(unit.visits for unit in units) or not policy.visits, name


def test_a_policy_that_does_not_exist_has_near_ones() -> None:
    with pytest.raises(UsageError, match="did you mean zero-infinity"):
        make_plan(profiles.chain(2), profiles.MACHINE, profiles.PLENTY, PlanRequest(policy="zero-infinit"))


def test_wishes_against_a_policy_are_refused() -> None:
    request = PlanRequest(policy="zero-offload", weights="disk")
    with pytest.raises(UsageError, match="policy 'zero-offload' keeps weights on host, not on disk"):
        make_plan(profiles.chain(2), profiles.MACHINE, profiles.PLENTY, request)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "rows"),
    (
        ("rtx3090+980pro+64GB", 64), ("lohan-4090", 2), ("lohan-4090", 32),
        ("a100-80+2x990pro+256GB", 1), ("a100-80+2x990pro+256GB", 32), ("h100+4x990pro+512GB", 8),
        ("l40s+8x990pro+384GB", 1), ("l40s+8x990pro+384GB", 16),
    ),
)  # fmt: skip
def test_ours_is_never_slower_on_machines_that_exist(name: str, rows: int) -> None:
    machine, width, tokens = find_machine(name), 5120, 1024 * rows
    model = profiles.chain(40, 12 * width**2, 2 * tokens * width, flops=24.0 * tokens * width**2)
    budget = Budget(int(0.95 * machine.device_bytes), int(0.9 * machine.host_bytes), machine.disk_bytes, 2 << 30)
    ours = plan(model, machine.hardware, budget, True)
    assert ours is not None
    for policy in POLICIES:
        theirs = plan(model, machine.hardware, budget, True, policy)
        assert theirs is None or ours.step_seconds <= CLOSE * theirs.step_seconds, policy
