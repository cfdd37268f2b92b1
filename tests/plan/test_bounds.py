from dataclasses import replace

import pytest
from hypothesis import given, settings

from plan import profiles
from sampling import examples
from spillway.plan.bounds import lower_bound
from spillway.plan.lower import complete, lower_step
from spillway.plan.make import make_plan
from spillway.plan.pools import recomputed_flops
from spillway.plan.request import PlanRequest
from spillway.plan.simulate import simulate, step_seconds
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan


@settings(max_examples=examples(60), deadline=None)
@given(profiles.models(), profiles.requests())
def test_no_plan_is_predicted_to_be_faster_than_the_bound(model: ModelProfile, fixed: dict[str, object]) -> None:
    plan = make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(**fixed))
    assert plan.step_seconds >= 0.999 * lower_bound(model, plan.placement, profiles.MACHINE)


def test_a_plan_that_guesses_at_the_norm_reads_ahead_in_steps_that_do_not() -> None:
    model, budget = profiles.chain(12), Budget(10**9, 10**9, 10**12, 10**7)
    machine = replace(
        profiles.MACHINE, read_bytes_per_s=2e8, write_bytes_per_s=2e8, disk_together=1.0, device_flops_per_s=1e11
    )
    request = PlanRequest("overlap", "disk", "disk", clip=True, activations="recompute")
    plan = make_plan(model, machine, budget, request)
    without = complete(model, lower_step(model, replace(plan.placement, ahead=0)))
    assert plan.placement.speculates and plan.placement.ahead and plan.kept
    assert 1.1 * plan.wary_step_seconds < step_seconds(without, machine, wary=True)[0]
    assert step_seconds(plan, machine) == step_seconds(without, machine)


def test_what_is_read_ahead_makes_a_step_faster_and_no_faster_than_the_bound() -> None:
    model, budget = profiles.chain(12), Budget(10**9, 10**9, 10**12, 10**7)
    machine = replace(
        profiles.MACHINE, read_bytes_per_s=2e8, write_bytes_per_s=2e8, disk_together=1.0, device_flops_per_s=1e11
    )
    plan = make_plan(model, machine, budget, PlanRequest("deferred", "disk", "disk", activations="recompute"))
    without = replace(plan.placement, ahead=0)
    assert plan.placement.ahead and plan.kept
    assert 1.1 * plan.step_seconds < step_seconds(lower_step(model, without), machine)[0]
    assert plan.step_seconds >= 0.999 * lower_bound(model, plan.placement, machine)
    assert lower_bound(model, plan.placement, machine) < lower_bound(model, without, machine)
    busy = simulate(plan.ops, plan.pools, machine).busy_s()
    assert busy["read"] >= 0.95 * plan.step_seconds


@pytest.mark.parametrize("update", ("serial", "overlap", "deferred"))
def test_what_is_frozen_in_a_unit_is_streamed_and_never_written(update: str) -> None:
    whole, share = profiles.chain(4), 1 / 64
    adapted = replace(whole, units=tuple(profiles.unit(unit.num_params, share) for unit in whole.units))
    request = PlanRequest(update, "disk", "disk", clip=False, activations="recompute")
    full, part = (make_plan(model, profiles.MACHINE, profiles.PLENTY, request) for model in (whole, adapted))

    def amount(plan: Plan, kind: str, group: str) -> float:
        return sum(op.amount for op in plan.ops if (op.kind, op.group) == (kind, group))

    assert amount(part, "WRITE", "state") == share * amount(full, "WRITE", "state")
    assert amount(part, "READ", "state") == share * amount(full, "READ", "state")
    assert amount(part, "UPLOAD", "weight") >= amount(full, "UPLOAD", "weight")
    # Gradients of inputs, and of a small part of the weights.
    forward = amount(full, "FORWARD", "none") + amount(full, "LOSS", "none")
    again = sum(map(recomputed_flops, adapted.calls, part.placement.acts))
    assert amount(part, "BACKWARD", "none") - again == pytest.approx(forward * (1 + share))
