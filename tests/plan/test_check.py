import dataclasses

import pytest

from plan import profiles
from spillway.plan.check import check
from spillway.plan.make import make_plan
from spillway.plan.request import PlanRequest
from spillway.spec.errors import InvariantError
from spillway.spec.plan import Plan


@pytest.fixture
def plan() -> Plan:
    return make_plan(
        profiles.chain(4), profiles.MACHINE, profiles.PLENTY, PlanRequest("overlap", "disk", "disk", False)
    )


def first(plan: Plan, kind: str) -> int:
    return next(op.id for op in plan.ops if op.kind == kind)


def changed(plan: Plan, index: int, **fields: object) -> Plan:
    ops = list(plan.ops)
    ops[index] = ops[index]._replace(**fields)
    return dataclasses.replace(plan, ops=tuple(ops))


def test_a_dependency_on_a_later_operation_is_found(plan: Plan) -> None:
    with pytest.raises(InvariantError, match=r"operation 0 .* depends on a later operation"):
        check(changed(plan, 0, deps=(1,)))


def test_a_lease_that_is_never_given_back_is_found(plan: Plan) -> None:
    with pytest.raises(InvariantError, match="no free slab|never given back|nobody holds"):
        check(changed(plan, first(plan, "UPLOAD"), give=()))


def test_using_what_nobody_holds_is_found(plan: Plan) -> None:
    with pytest.raises(InvariantError, match="which nobody holds"):
        check(changed(plan, first(plan, "FORWARD"), source="s99.9"))


def test_a_pool_that_is_too_small_is_found(plan: Plan) -> None:
    pools = tuple(dataclasses.replace(pool, count=0) for pool in plan.pools)
    with pytest.raises(InvariantError, match="no free slab"):
        check(dataclasses.replace(plan, pools=pools))


def test_a_slab_that_is_too_small_is_found(plan: Plan) -> None:
    pools = tuple(dataclasses.replace(pool, slab_bytes=pool.slab_bytes // 2) for pool in plan.pools)
    with pytest.raises(InvariantError, match=r"READ .* to a slab of .*, which is smaller"):
        check(dataclasses.replace(plan, pools=pools))
