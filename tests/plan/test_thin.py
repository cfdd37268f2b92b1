from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from plan import profiles
from plan.test_policies import machines
from spillway.plan import search
from spillway.plan.make import make_plan
from spillway.plan.pools import Kinds
from spillway.plan.request import PlanRequest
from spillway.plan.thin import in_few_parts, thinned
from spillway.spec.errors import PlanInfeasible
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Placement


def placed(model: ModelProfile) -> Placement:
    return make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(states="disk")).placement


def test_of_like_units_a_share_is_left_and_one_of_each_kind() -> None:
    model = profiles.chain(40)
    placement = placed(model)
    first = replace(placement.units[1], weights="host" if placement.units[1].weights == "disk" else "disk")
    mixed = replace(placement, units=(*placement.units[:1], first, *placement.units[2:]))
    fewer, thin = thinned(model, Kinds(model), mixed, 0.25)
    assert [unit.weight_bytes for unit in fewer.units].count(model.units[1].weight_bytes) == 1 + 10
    assert thin.units.count(first) == 1
    assert len(thin.units) == len(fewer.units) and len(thin.acts) == len(fewer.calls)
    assert [call.unit for call in fewer.calls] == list(range(len(fewer.units)))
    assert fewer.calls[-1].kind == "LOSS"


def test_units_that_are_called_twice_or_by_nobody_stay() -> None:
    chain = profiles.chain(40, tied=True)
    model = replace(chain, units=(*chain.units, profiles.unit(4096)), resident_units=frozenset({len(chain.units)}))
    placement = placed(model)
    alike = replace(placement, acts=(placement.acts[0], *[placement.acts[1]] * 40, placement.acts[-1]))
    fewer, _ = thinned(model, Kinds(model), alike, 0.1)
    assert [call.unit for call in fewer.calls][-1] == 0 and fewer.resident_units == {len(fewer.units) - 1}
    assert len(fewer.units) == 1 + 4 + 1


def test_updates_in_few_parts_are_no_smaller_than_before() -> None:
    model = profiles.chain(4)
    small = replace(placed(model), subgroup=4096)
    assert in_few_parts(model, small).subgroup == model.units[0].num_trainable // 2
    large = replace(small, subgroup=1 << 30)
    assert in_few_parts(model, large).subgroup == 1 << 30


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(machines(), st.floats(0.3, 1.5), st.floats(0.05, 1.5), st.booleans())
def test_plans_are_as_fast_as_those_chosen_by_whole_steps(
    monkeypatch: pytest.MonkeyPatch, machine: HardwareSpec, host: float, device: float, clip: bool
) -> None:
    model = profiles.chain(40, 1 << 22, 1 << 22, flops=1e11)
    total = sum(unit.weight_bytes + unit.state_bytes for unit in model.units)
    budget = Budget(int(device * total) + 10**8, int(host * total) + 10**8, 10**14, 10**6)
    request = PlanRequest(clip=clip)
    try:
        ours = make_plan(model, machine, budget, request)
    except PlanInfeasible:
        return
    with monkeypatch.context() as patch:
        patch.setattr(search, "thinned", lambda model, kinds, placement, share: (model, placement))
        patch.setattr(search, "in_few_parts", lambda model, placement: placement)
        whole = make_plan(model, machine, budget, request)
    assert ours.step_seconds <= 1.02 * whole.step_seconds


@pytest.mark.parametrize("machine", (profiles.MACHINE, profiles.CPU))
@pytest.mark.parametrize("trained", (True, False))
def test_many_units_come_to_rest_before_their_calls_are_known(machine: HardwareSpec, trained: bool) -> None:
    model = replace(profiles.chain(40), calls=())
    if not trained:
        frozen = (replace(unit, num_trainable=0, grad_bytes=0, state_bytes=0) for unit in model.units)
        model = replace(model, units=tuple(frozen))
    assert len(make_plan(model, machine, profiles.PLENTY, PlanRequest()).placement.units) == 42
