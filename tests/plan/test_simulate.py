import dataclasses

import pytest

from plan import profiles
from spillway.plan.make import make_plan
from spillway.plan.request import PlanRequest
from spillway.plan.simulate import simulate
from spillway.spec.hardware import HardwareSpec
from spillway.spec.plan import Op, Pool

RATES = HardwareSpec("cuda", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_chain_takes_the_sum_and_independent_lanes_the_maximum() -> None:
    ops = (
        Op(0, "UPLOAD", "upload", 0, "weight", 3.0),
        Op(1, "FORWARD", "compute", 0, "none", 4.0, (0,)),
        Op(2, "UPDATE", "update", 0, "state", 5.0),
    )
    assert simulate(ops, (), RATES).seconds == pytest.approx(7.0, abs=1e-3)


def test_reads_and_writes_share_the_drives() -> None:
    ops = (Op(0, "READ", "read", 0, "state", 2.0), Op(1, "WRITE", "write", 0, "state", 2.0))
    assert simulate(ops, (), RATES).seconds == pytest.approx(4.0, abs=1e-3)


def test_a_lease_is_waited_for_in_the_order_of_the_list() -> None:
    pools = (Pool("p", "host", 1, 1),)
    ops = (
        Op(0, "READ", "read", 0, "weight", 1.0, (), (("p", "a"),)),
        Op(1, "UPLOAD", "upload", 0, "weight", 3.0, (0,), (), ("a",)),
        Op(2, "READ", "read", 1, "weight", 1.0, (), (("p", "b"),)),
        Op(3, "UPLOAD", "upload", 1, "weight", 3.0, (2,), (), ("b",)),
    )
    trace = simulate(ops, pools, RATES)
    assert trace.seconds == pytest.approx(8.0, abs=1e-3)
    assert trace.busy_s()["upload"] == pytest.approx(6.0, abs=1e-3)


def test_more_bandwidth_never_makes_the_step_slower() -> None:
    import dataclasses

    plan = make_plan(profiles.chain(6), profiles.MACHINE, profiles.PLENTY, PlanRequest("overlap", "disk", "disk"))
    base = simulate(plan.ops, plan.pools, profiles.MACHINE).seconds
    for field in ("device_flops_per_s", "read_bytes_per_s", "write_bytes_per_s", "update_params_per_s"):
        faster = dataclasses.replace(profiles.MACHINE, **{field: 2 * getattr(profiles.MACHINE, field)})
        assert simulate(plan.ops, plan.pools, faster).seconds <= base * 1.0001


def test_an_update_takes_checksums_only_of_what_goes_on_to_the_drives() -> None:
    model = profiles.chain(4, 1 << 24)
    slow = dataclasses.replace(profiles.MACHINE, checksum_params_per_s=profiles.MACHINE.update_params_per_s / 3)
    params = sum(unit.num_trainable for unit in model.units)
    for where, checked in (("disk", params), ("host", 0)):
        plan = make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest("overlap", where, where))
        before, after = (simulate(plan.ops, plan.pools, machine).busy_s() for machine in (profiles.MACHINE, slow))
        assert after["update"] - before["update"] == pytest.approx(checked / slow.checksum_params_per_s)


def test_work_that_shares_the_cores_slows_the_other_down_by_what_was_measured() -> None:
    ops = (Op(0, "FORWARD", "compute", 0, "none", 8.0), Op(1, "UPDATE", "update", 0, "state", 4.0, target="home"))
    for kept, seconds in ((0.5, 12.0), (0.25, 20.0), (1.0, 8.0)):
        shared = dataclasses.replace(RATES, cores_shared=True, cores_together=kept)
        assert simulate(ops, (), shared).seconds == pytest.approx(seconds, abs=0.01)
