"""The proof that a plan can run.

[Note: why no plan deadlocks] Three rules hold at run time: each lane runs its operations in list order, leases of a
pool are granted in list order, and a dependency always stands earlier in the list. If the list can also be run strictly
one operation at a time within the pools (checked here), then the earliest unfinished operation can always start: its
dependencies and the lane's earlier operations are done; every earlier taker of its pools has been granted, no later one
has, and all the leases that the one-by-one run would have got back by now have been given back. So there is always
progress, whatever the timing.
"""

from spillway.spec.errors import invariant
from spillway.spec.plan import GROUPS, KINDS, LANES, Op, Plan, Pool


def check(plan: Plan) -> None:
    """Raise InvariantError, naming the operation, unless every list of the plan can run to their end."""
    pools = {pool.name: pool for pool in plan.pools}
    for ops in plan.lists:
        check_ops(ops, pools)


def check_ops(ops: tuple[Op, ...], pools: dict[str, Pool]) -> None:
    """Acyclic, every lease taken once and given back, and feasible one operation at a time."""
    free = {name: pool.count for name, pool in pools.items()}
    held: dict[str, str] = {}
    used: set[str] = set()
    for position, op in enumerate(ops):
        where = f"operation {position} ({op.kind} of unit {op.unit})"
        invariant(op.id == position, f"{where} carries the number {op.id}")
        known = op.kind in KINDS and op.lane in LANES and op.group in GROUPS
        invariant(known, f"{where} has an unknown kind, lane or group")
        invariant(all(0 <= dep < position for dep in op.deps), f"{where} depends on a later operation")
        invariant(op.amount >= 0, f"{where} has a negative amount")
        for pool, lease in op.take:
            invariant(lease not in used, f"{where} takes the lease {lease} a second time")
            invariant(free.get(pool, 0) > 0, f"{where} finds no free slab in {pool}")
            free[pool] -= 1
            held[lease] = pool
            used.add(lease)
        for lease in (op.source, op.target):
            invariant(
                lease in ("", "home", "written") or lease in held, f"{where} uses the lease {lease}, which nobody holds"
            )
        for lease in op.give:
            invariant(lease in held, f"{where} gives back the lease {lease}, which nobody holds")
            free[held.pop(lease)] += 1
    invariant(not held, f"the leases {sorted(held)} are never given back")
