"""Ours: `ours.py '{"shape": ..., "rows": ..., ...}'`. After the steps a line of facts about the plan."""

import json
import sys

import torch
from gpu_common import SWAPPED, make_batch, make_model, run

import spillway
from spillway import planner
from spillway.assembly import prepared
from spillway.plan.check import check
from spillway.plan.lower import complete
from spillway.plan.make import swapped_plans
from spillway.plan.pools import stored_bytes
from spillway.plan.request import PlanRequest
from spillway.spec.errors import required
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan

given = json.loads(sys.argv[1])


def plan_that_swaps(profile: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest) -> Plan:
    """The plan of that point of the curve, in the place of the fastest one."""
    plans = swapped_plans(profile, hardware, budget, request, SWAPPED)
    plan = complete(profile, plans[min(given["swapped"], len(plans) - 1)][1])
    check(plan)
    return plan


if given["swapped"] is not None:
    setattr(planner, "make_plan", plan_that_swaps)  # noqa: B010
model = make_model(given["shape"], given["device"])
settings = spillway.AdamW(
    lr=1e-5, max_grad_norm=given["clip"], moments=given["moments"], master_bits=given["master_bits"]
)
longest = make_batch(given["rows"], given["shape"], given["device"], torch.Generator().manual_seed(0))
model, optimizer = spillway.prepare(
    model,
    settings,
    example={"input_ids": longest, "labels": longest},
    store=given["store"],
    device=given["device"],
    micro_batch=given["micro"],
    keep=spillway.KeepPoints(0, of_memory=False),
    **given["options"],
)
model.train()
if given["device"] == "cuda":  # the weights were made there; from now on they rest where the plan has them
    torch.cuda.empty_cache()


def step(ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss


run(step, given["rows"], given["shape"], given["device"], given["seconds"])
schedule = required(prepared(model).session.engine.schedule, "steps have run")
plan, placement, trace = schedule.plan, schedule.plan.placement, optimizer.last_result.traces[-1]
kept = zip(schedule.profile.calls, placement.acts, strict=True)
tiers = {
    part: {tier: [getattr(unit, part) for unit in placement.units].count(tier) for tier in ("device", "host", "disk")}
    for part in ("weights", "states")
}
facts = {
    "update": placement.update,
    "window": placement.window,
    "kept": sorted({f"{kept.tier}{'+tape' if kept.tape else ''}{'+all' if kept.everything else ''}"
                    for kept in placement.acts}),
    "streams": placement.streams,
    "moved_activation_bytes": sum(stored_bytes(call, how) for call, how in kept if how.tier != "device"),
    "deferring": sum(unit.defers for unit in placement.units),
    "visiting": sum(unit.visits for unit in placement.units),
    "predicted_seconds": plan.step_seconds,
    "bottleneck": plan.bottleneck,
    "planned_peaks": {"device": plan.peaks.device, "host": plan.peaks.host, "disk": plan.peaks.disk},
    "busy": {lane: seconds / trace.seconds for lane, seconds in trace.busy_s().items()},
    **tiers,
}  # fmt: skip
print(json.dumps({"facts": facts}), flush=True)
spillway.close(model)
