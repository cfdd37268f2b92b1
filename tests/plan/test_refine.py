"""A step shows how fast the machine is."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from plan import profiles
from spillway.plan.make import make_plan
from spillway.plan.refine import RATES, refined
from spillway.plan.request import PlanRequest
from spillway.plan.simulate import simulate

_MODEL = profiles.chain(6)


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({name: st.floats(0.5, 2.0) for name in RATES.values()}), st.booleans())
def test_steps_are_predicted_as_the_machine_really_takes_them(factors: dict[str, float], shared: bool) -> None:
    """The machine is not what was measured, and its lanes share cores: found from the times of one step."""
    assumed = replace(profiles.MACHINE, cores_shared=shared)
    real = replace(assumed, **{name: factor * getattr(assumed, name) for name, factor in factors.items()})
    plan = make_plan(_MODEL, assumed, profiles.PLENTY, PlanRequest(weights="disk", states="disk"))
    trace = simulate(plan.ops, plan.pools, real)
    found = simulate(plan.ops, plan.pools, refined(assumed, plan.ops, plan.pools, trace))
    assert abs(found.seconds / trace.seconds - 1) < 0.03


def test_a_lane_that_did_nothing_keeps_its_rate() -> None:
    plan = make_plan(_MODEL, profiles.MACHINE, profiles.PLENTY, PlanRequest(weights="host", states="host"))
    trace = simulate(plan.ops, plan.pools, profiles.MACHINE)
    assert refined(profiles.MACHINE, plan.ops, plan.pools, trace).read_bytes_per_s == profiles.MACHINE.read_bytes_per_s
