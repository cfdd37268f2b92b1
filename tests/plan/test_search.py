import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan import profiles
from sampling import examples
from spillway.plan.check import check
from spillway.plan.make import fits, make_plan
from spillway.plan.request import PlanRequest, space_of
from spillway.plan.simulate import simulate
from spillway.spec.errors import PlanInfeasible, UsageError
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.jsonable import from_json, to_json
from spillway.spec.model import ModelProfile
from spillway.spec.plan import IN_PLACE, KeepPoints, Kept, Plan


@settings(max_examples=examples(50), deadline=None)
@given(profiles.models(), profiles.requests(), st.integers(20, 40), st.integers(20, 40))
def test_any_plan_stays_within_its_budget_runs_to_its_end_and_survives_json(
    model: ModelProfile, fixed: dict[str, object], host: int, device: int
) -> None:
    budget = Budget(1 << device, 1 << host, 1 << 45, 1 << 19)
    try:
        plan = make_plan(model, profiles.MACHINE, budget, PlanRequest(**fixed))
    except PlanInfeasible as error:
        assert "the smallest budget that works is" in str(error)
        return
    check(plan)
    assert plan.peaks.device <= budget.device_bytes
    assert plan.peaks.host <= budget.host_bytes
    assert plan.peaks.disk <= budget.disk_bytes
    for ops in plan.lists:
        assert len(simulate(ops, plan.pools, profiles.MACHINE).spans) == len(ops)
    assert from_json(Plan, to_json(plan)) == plan


@settings(max_examples=examples(40), deadline=None)
@given(profiles.models(), profiles.requests(), st.integers(22, 36))
def test_the_smallest_budget_that_is_said_to_work_works(
    model: ModelProfile, fixed: dict[str, object], host: int
) -> None:
    budget = Budget(1 << 20, 1 << host, 1 << 45, 1 << 19)
    with_all = dataclasses.replace(budget, device_bytes=1 << 45, host_bytes=1 << 45)
    smallest = make_plan(model, profiles.MACHINE, with_all, PlanRequest(**fixed))
    try:
        make_plan(model, profiles.MACHINE, budget, PlanRequest(**fixed))
    except PlanInfeasible as error:
        needed = error.smallest
        enough = Budget(needed.device, needed.host, needed.disk, budget.process_bytes)
        assert make_plan(model, profiles.MACHINE, enough, PlanRequest(**fixed)).ops
    assert smallest.ops


@settings(max_examples=examples(100), deadline=None)
@given(
    profiles.models(),
    profiles.requests(),
    st.sampled_from([profiles.MACHINE, profiles.CPU]),
    st.tuples(st.integers(22, 30), st.integers(20, 30), st.integers(24, 34)),
    st.sampled_from([0.25, 1.0, 2.0]),
)
def test_units_stay_where_they_rest_whatever_batch_comes_next(
    model: ModelProfile, asked: dict[str, object], machine: HardwareSpec, memory: tuple[int, int, int], times: float
) -> None:
    host, device, disk = (1 << bits for bits in memory)
    budget = Budget(device, host, disk, 1 << 19)
    request = PlanRequest(**asked)
    longer = [dataclasses.replace(call, act_bytes=int(times * call.act_bytes)) for call in model.calls]
    try:
        first = make_plan(model, machine, budget, request)
        following = make_plan(
            dataclasses.replace(model, calls=tuple(longer)),
            machine,
            budget,
            dataclasses.replace(request, fixed=first.placement),
        )
    except PlanInfeasible:
        return
    assert following.placement.units == first.placement.units


def test_memory_is_filled_before_the_disk_is_used() -> None:
    model = profiles.chain(8)
    plan = make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest())
    assert {unit.states for unit in plan.placement.units} == {"device"}
    plan = make_plan(model, profiles.CPU, profiles.PLENTY, PlanRequest())
    assert {(unit.weights, unit.states) for unit in plan.placement.units} == {("device", "device")}
    assert not any(op.group == "weight" for op in plan.ops)  # nothing is copied to where it is already
    assert set(plan.placement.acts) == {Kept("device", everything=True)}
    tight = Budget(10**9, 10**8, 10**12, 10**7)
    plan = make_plan(model, profiles.CPU, tight, PlanRequest())
    assert {unit.states for unit in plan.placement.units} == {"disk"}


@pytest.mark.parametrize("wish", ("keep", "tape"))
def test_what_the_user_wants_kept_is_kept_even_where_recomputing_costs_nothing(wish: str) -> None:
    slow = dataclasses.replace(profiles.MACHINE, read_bytes_per_s=1e8, write_bytes_per_s=1e8)
    request = PlanRequest(weights="disk", states="disk", activations=wish)
    plan = make_plan(profiles.chain(8), slow, profiles.PLENTY, request)
    assert sum(kept.everything or bool(kept.tape) for kept in plan.placement.acts) >= 8


def cut(model: ModelProfile, chunks: int) -> ModelProfile:
    """Each call in so many micro-batches, that take a known part of the device's memory."""
    calls = (dataclasses.replace(call, chunks=chunks, work_bytes=1 << 26, forks=True) for call in model.calls)
    return dataclasses.replace(model, calls=tuple(calls))


def test_as_many_micro_batches_run_side_by_side_as_memory_is_left_for() -> None:
    model, far = cut(profiles.chain(8), 3), {"weights": "host", "states": "host", "activations": "recompute"}
    one = make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(**far, streams=1))
    # Its work, workspaces, and the gradients of a unit.
    stream = 2 * (1 << 26) + max(unit.grad_bytes for unit in model.units)
    for room in range(4):
        device = one.peaks.device + room * stream
        budget = dataclasses.replace(profiles.PLENTY, device_bytes=device)
        plan = make_plan(model, profiles.MACHINE, budget, PlanRequest(**far))
        # Streams have memory of their own, beside that of the one they start from.
        assert plan.placement.streams == (room if room > 1 else 1)
        assert plan.peaks.device <= device
        assert plan.step_seconds == one.step_seconds
        assert plan.ops == one.ops
    assert make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(**far)).placement.streams == 3
    assert make_plan(profiles.chain(8), profiles.MACHINE, profiles.PLENTY, PlanRequest(**far)).placement.streams == 1


def test_streams_that_are_asked_for_count_from_the_start() -> None:
    model, far = cut(profiles.chain(8), 3), {"weights": "host", "states": "host"}
    one, three = (
        make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(**far, activations="recompute", streams=count))
        for count in (1, 3)
    )
    assert three.placement.streams == 3
    assert three.peaks.device > 4 * (1 << 26) > one.peaks.device
    short = dataclasses.replace(profiles.PLENTY, device_bytes=1 << 26)
    with pytest.raises(PlanInfeasible, match="device memory"):
        make_plan(model, profiles.MACHINE, short, PlanRequest(**far, streams=3))
    for machine, policy, said in ((profiles.CPU, "auto", "on all its cores"), (profiles.MACHINE, "lohan", "one micro")):
        with pytest.raises(UsageError, match=said):
            make_plan(model, machine, profiles.PLENTY, PlanRequest(streams=2, policy=policy))


def test_disk_without_a_store_is_refused() -> None:
    with pytest.raises(UsageError, match="states='disk' needs a store"):
        make_plan(profiles.chain(2), profiles.MACHINE, profiles.PLENTY, PlanRequest(states="disk", has_store=False))


def test_overlapped_updates_are_predicted_to_be_faster_than_serial_ones() -> None:
    model = profiles.chain(24, 1 << 23, 1 << 22, flops=2e12)
    where = {"weights": "disk", "states": "disk"}
    times = {
        update: make_plan(model, profiles.MACHINE, profiles.PLENTY, PlanRequest(update, **where)).step_seconds
        for update in ("serial", "overlap-naive", "overlap")
    }
    assert times["overlap"] < times["overlap-naive"] < times["serial"]


def test_steps_are_made_in_place_where_the_drives_have_no_room_for_two_copies() -> None:
    model = profiles.chain(6)
    request = PlanRequest("overlap", "disk", "disk", activations="recompute")
    budget = Budget(10**8, 10**8, 10**12, 10**7)
    whole = make_plan(model, profiles.MACHINE, budget, request)
    assert whole.placement.keep.last == 1
    short = dataclasses.replace(budget, disk_bytes=int(0.6 * whole.peaks.disk))
    plan = make_plan(model, profiles.MACHINE, short, request)
    assert plan.placement.keep.last == 0 and plan.peaks.disk <= short.disk_bytes
    assert any("no saved points" in note for note in plan.notes)
    with pytest.raises(PlanInfeasible, match="disk"):
        make_plan(model, profiles.MACHINE, short, dataclasses.replace(request, goes_on=True))
    with pytest.raises(PlanInfeasible, match="disk"):
        make_plan(model, profiles.MACHINE, dataclasses.replace(budget, disk_bytes=whole.peaks.disk // 4), request)


def test_as_many_points_are_kept_as_the_drives_have_room_for() -> None:
    model = profiles.chain(6)
    request = PlanRequest("overlap", "disk", "disk", activations="recompute", keep=KeepPoints(4))
    budget = Budget(10**8, 10**8, 10**12, 10**7)
    whole = make_plan(model, profiles.MACHINE, budget, request)
    assert whole.placement.keep.last == 4 and not any("saved point" in note for note in whole.notes)
    for share, last in ((0.85, 3), (0.65, 2), (0.45, 1)):
        short = dataclasses.replace(budget, disk_bytes=int(share * whole.peaks.disk))
        for asked in (request, dataclasses.replace(request, goes_on=True)):
            plan = make_plan(model, profiles.MACHINE, short, asked)
            assert plan.placement.keep.last == last and plan.peaks.disk <= short.disk_bytes
            assert f"room for {last} saved point" in plan.notes[-1]
            assert fits(model, profiles.MACHINE, short, asked)


def test_what_the_drives_have_no_room_for_rests_in_memory_and_on_the_device() -> None:
    model = profiles.chain(8)
    request = PlanRequest(activations="recompute", keep=IN_PLACE)
    state = sum(unit.weight_bytes + unit.state_bytes for unit in model.units)
    for device, host, disk in ((0.3, 0.9, 0.4), (0.8, 0.6, 0.4), (0.3, 1.5, 0.02)):
        working = 6 * max(unit.weight_bytes + unit.state_bytes for unit in model.units)
        budget = Budget(int(device * state) + working, int(host * state) + working, int(disk * state), 0)
        plan = make_plan(model, profiles.MACHINE, budget, request)
        assert plan.peaks.disk <= budget.disk_bytes < state
        assert plan.peaks.host <= budget.host_bytes and plan.peaks.device <= budget.device_bytes


def test_memory_that_nothing_else_may_use_takes_more_states_on_their_way() -> None:
    slow = dataclasses.replace(
        profiles.MACHINE, device_flops_per_s=3e10, read_bytes_per_s=4e8, write_bytes_per_s=1e8, disk_together=1.0
    )
    request = PlanRequest("deferred", weights="host", states="disk", clip=True)
    many = make_plan(profiles.chain(12), slow, profiles.PLENTY, request)
    scarce = dataclasses.replace(profiles.PLENTY, host_bytes=many.peaks.host // 2)
    few = make_plan(profiles.chain(12), slow, scarce, request)
    assert many.placement.state_slabs > few.placement.state_slabs
    assert many.step_seconds < 0.9 * few.step_seconds


def test_all_units_rest_on_the_device_where_memory_has_room_for_none() -> None:
    model = profiles.chain(6, 1 << 24)
    state = sum(unit.weight_bytes + unit.state_bytes for unit in model.units)
    largest = max(unit.weight_bytes + unit.state_bytes for unit in model.units)
    request = PlanRequest(has_store=False, activations="recompute")
    budget = Budget(2 * state, largest // 2, 0, 1 << 20)
    plan = make_plan(model, profiles.MACHINE, budget, request)
    assert all(where.states == "device" for where in plan.placement.units)
    assert plan.peaks.host <= budget.host_bytes


def test_a_visit_to_the_device_takes_no_checksums() -> None:
    model = profiles.chain(8, 1 << 24)
    slow_cpu = dataclasses.replace(profiles.MACHINE, update_params_per_s=1e8)
    request = PlanRequest("serial", "host", "host", policy="deep-optimizer-states")
    plan = make_plan(model, slow_cpu, profiles.PLENTY, request)
    assert any(where.visits for where in plan.placement.units)
    checked = dataclasses.replace(slow_cpu, checksum_params_per_s=1e8)
    before, after = (simulate(plan.ops, plan.pools, machine).seconds for machine in (slow_cpu, checked))
    assert after == pytest.approx(before)


def test_a_space_without_the_drives_is_none_where_activations_shall_lie_there() -> None:
    space = space_of(PlanRequest()).without_drives()
    assert space is not None
    assert not any("disk" in tiers for tiers in (space.weights, space.states, space.grads, space.inputs, space.kept_in))
    assert space_of(PlanRequest(activations="disk")).without_drives() is None
    assert space_of(PlanRequest(states="disk")).without_drives() is None


def test_slots_take_the_memory_that_nothing_else_could_use() -> None:
    # Weights are to rest on disk: where there is room for all of them on the way, none is read a second time.
    model, hardware = (
        profiles.chain(12),
        dataclasses.replace(profiles.MACHINE, read_bytes_per_s=1e8, write_bytes_per_s=1e8),
    )
    request = PlanRequest("deferred", "disk", "disk", clip=True, activations="recompute")
    read = {}
    for device_bytes in (3 * 10**7, 10**9):
        plan = make_plan(model, hardware, Budget(device_bytes, 10**9, 10**12, 10**7), request)
        read[device_bytes] = sum(op.amount for op in plan.ops if op.kind == "READ" and op.group == "weight")
    assert read[10**9] == 0 < read[3 * 10**7]
