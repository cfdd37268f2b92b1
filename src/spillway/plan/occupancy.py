"""Memory of every tier over the time of a step, from a trace and the leases of its operations."""

from spillway.spec.plan import Op, Plan
from spillway.spec.trace import Trace


def occupancy(plan: Plan, ops: tuple[Op, ...], trace: Trace) -> dict[str, list[tuple[float, int]]]:
    """Per tier: seconds since the step began, and bytes from then on. What is in no slab (weights and states at rest,
    the process, working memory) stays the same all step long, and makes up the rest of the tier's peak."""
    sizes = {pool.name: (pool.tier, pool.slab_bytes) for pool in plan.pools}
    laid = {tier: sum(pool.num_bytes for pool in plan.pools if pool.tier == tier) for tier in ("device", "host")}
    fixed = {"device": plan.peaks.device - laid["device"], "host": plan.peaks.host - laid["host"]}
    pool_of = {lease: pool for op in ops for pool, lease in op.take}
    changes: list[tuple[float, str, int]] = []
    for span in trace.spans:
        op = ops[span.op]
        for pool, _ in op.take:
            tier, size = sizes[pool]
            changes.append((span.start_s, tier, size))
        for lease in op.give:
            tier, size = sizes[pool_of[lease]]
            changes.append((span.end_s, tier, -size))
    for pool, _ in plan.kept if ops is plan.warm_ops else ():
        tier, size = sizes[pool]
        changes.append((0.0, tier, size))
    curves = {tier: [(0.0, max(fixed[tier], 0))] for tier in fixed}
    for moment, tier, size in sorted(changes):
        curves[tier].append((moment, curves[tier][-1][1] + size))
    return curves
