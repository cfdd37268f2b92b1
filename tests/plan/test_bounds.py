from hypothesis import given, settings

from plan import profiles
from spillway.plan.bounds import lower_bound
from spillway.plan.request import PlanRequest
from spillway.plan.search import make_plan
from spillway.spec.model import ModelProfile


@settings(max_examples=60, deadline=None)
@given(profiles.models(), profiles.requests())
def test_no_plan_is_predicted_to_be_faster_than_the_bound(model: ModelProfile, fixed: dict[str, object]) -> None:
    plan = make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(**{**fixed, "accumulation": 1}))
    assert plan.step_seconds >= 0.999 * lower_bound(model, plan.placement, profiles.MACHINE)
