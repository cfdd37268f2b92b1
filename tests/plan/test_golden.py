"""Plans are reviewed like code: a change of the planner shows up as a change of these files.

After an intended change: `PYTHONPATH=tests python tests/plan/test_golden.py` writes them again.
"""

from pathlib import Path

import pytest

from plan import profiles
from spillway.plan.make import make_plan
from spillway.plan.request import PlanRequest
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Op

FOLDER = Path(__file__).parent / "golden"
TIGHT = Budget(10**8, 10**8, 10**12, 10**7)


def clipped(update: str, weights: str) -> PlanRequest:
    return PlanRequest(update, weights, "disk", clip=True, activations="recompute")


CASES = {
    "overlap-disk": (profiles.chain(3), TIGHT, PlanRequest("overlap", "disk", "disk", activations="recompute")),
    "overlap-naive-disk": (
        profiles.chain(3),
        TIGHT,
        PlanRequest("overlap-naive", "disk", "disk", activations="recompute"),
    ),
    "serial-clip-disk": (profiles.chain(3), TIGHT, clipped("serial", "disk")),
    "deferred-clip-disk": (profiles.chain(3), TIGHT, clipped("deferred", "disk")),
    "deferred-ahead": (
        profiles.chain(3, flops=1e12),
        Budget(10**8, 10**9, 10**12, 10**7),
        clipped("deferred", "disk"),
    ),
    "overlap-clip-mixed": (profiles.chain(3), TIGHT, clipped("overlap", "host")),
    "overlap-host-tied": (
        profiles.chain(3, tied=True),
        profiles.PLENTY,
        PlanRequest("overlap", "host", "host", activations="recompute"),
    ),
    "accumulate-disk": (
        profiles.chain(2),
        TIGHT,
        PlanRequest("overlap", "disk", "disk", accumulation=2, activations="recompute"),
    ),
    "deferred-accumulate": (
        profiles.chain(2),
        TIGHT,
        PlanRequest("deferred", "disk", "disk", accumulation=2, activations="recompute"),
    ),
    "sums-on-disk": (
        profiles.chain(2),
        Budget(6 * 10**7, 4 * 10**7, 10**12, 10**7),
        PlanRequest("serial", "disk", "disk", accumulation=2, activations="recompute"),
    ),
    "overlap-disk-tape": (
        profiles.chain(3, flops=1e12),
        Budget(6 * 10**7, 10**8, 10**12, 10**7),
        PlanRequest("overlap", "disk", "disk", activations="tape"),
    ),
    "serial-visits": (
        profiles.chain(3),
        Budget(10**8, 2 * 10**8, 10**12, 10**7),
        PlanRequest("auto", "host", "host", policy="deep-optimizer-states"),
    ),
    "overlap-disk-kept": (profiles.chain(3), TIGHT, PlanRequest("overlap", "disk", "disk", activations="keep")),
}


def line(op: Op) -> str:
    call = f" call {op.call}" if op.call >= 0 else ""
    part = f" [{op.start}:{op.stop}]" if op.stop else ""
    take = "".join(f" +{lease}" for _, lease in op.take)
    give = "".join(f" -{lease}" for lease in op.give)
    deps = f" after {','.join(map(str, op.deps))}" if op.deps else ""
    return f"{op.id:3d} {op.lane:8s} {op.kind} {op.group} unit {op.unit}{call}{part}{take}{give}{deps}"


def text(case: tuple[ModelProfile, Budget, PlanRequest]) -> str:
    plan = make_plan(case[0], profiles.MACHINE, case[1], case[2])
    pools = [f"pool {pool.name} on {pool.tier}: {pool.count} x {pool.slab_bytes}" for pool in plan.pools]
    parts = [*pools, "step", *map(line, plan.ops)]
    more = {
        "accumulate": plan.accumulate_ops,
        "begin": plan.begin_ops,
        "wary": plan.wary_ops,
        "flush": plan.flush_ops,
        "cold": plan.cold_ops,
    }
    for title, ops in more.items():
        parts += [title, *map(line, ops)] if ops else []
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_reviewed_one(name: str) -> None:
    assert text(CASES[name]) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (FOLDER / f"{name}.txt").write_text(text(case))
