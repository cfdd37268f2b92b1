"""The proof that a plan can run.

[Note: why no plan deadlocks] Three rules hold at run time: each lane runs its operations in list order, leases of a
pool are granted in list order, and a dependency always stands earlier in the list. If the list can also be run strictly
one operation at a time within the pools (checked here), then the earliest unfinished operation can always start: its
dependencies and the lane's earlier operations are done; every earlier taker of its pools has been granted, no later one
has, and all the leases that the one-by-one run would have got back by now have been given back. So there is always
progress, whatever the timing.
"""

from spillway.spec.errors import InvariantError, invariant
from spillway.spec.plan import GROUPS, HOME, KINDS, LANES, WRITTEN, Op, Plan, Pool
from spillway.spec.sizes import PAGE


def check(plan: Plan) -> None:
    """Raise InvariantError, naming the operation, unless every list of the plan can run to their end."""
    pools = {pool.name: pool for pool in plan.pools}
    for ops in plan.lists:
        if ops is plan.warm_ops or ops is plan.cold_ops:
            check_ops(ops, pools, plan.kept if ops is plan.warm_ops else (), plan.kept)
        else:
            check_ops(ops, pools)


def check_ops(
    ops: tuple[Op, ...],
    pools: dict[str, Pool],
    found: tuple[tuple[str, str], ...] = (),
    kept: tuple[tuple[str, str], ...] = (),
) -> None:
    """Acyclic, every lease taken once and given back, large enough, and feasible one operation at a time. `found`:
    leases that the list begins with, and their pools; `kept`: those that it takes last and leaves to the next list."""
    free = {name: pool.count for name, pool in pools.items()}
    held = {lease: pool for pool, lease in found}
    for pool in held.values():
        free[pool] -= 1
    invariant(min(free.values(), default=0) >= 0, "more slabs are found than there are")
    left = dict.fromkeys(lease for _, lease in kept)
    used: set[str] = set()
    for position, op in enumerate(ops):
        if op.id != position:
            _refuse(position, op, f"carries the number {op.id}")
        if op.kind not in KINDS or op.lane not in LANES or op.group not in GROUPS:
            _refuse(position, op, "has an unknown kind, lane or group")
        if op.deps and not (min(op.deps) >= 0 and max(op.deps) < position):
            _refuse(position, op, "depends on a later operation")
        if op.amount < 0:
            _refuse(position, op, "has a negative amount")
        for pool, lease in op.take:
            if lease in held or (lease in used and lease not in left):
                _refuse(position, op, f"takes the lease {lease} a second time")
            if free.get(pool, 0) <= 0:
                _refuse(position, op, f"finds no free slab in {pool}")
            if op.kind in _MOVES and op.amount > pools[pool].slab_bytes + _PADDING:
                _refuse(position, op, f"moves {op.amount:.0f} bytes to a slab of {pool}, which is smaller")
            free[pool] -= 1
            held[lease] = pool
            used.add(lease)
        for lease in (op.source, op.target):
            if lease not in _PLACES and lease not in held:
                _refuse(position, op, f"uses the lease {lease}, which nobody holds")
        for lease in op.give:
            if lease not in held:
                _refuse(position, op, f"gives back the lease {lease}, which nobody holds")
            free[held.pop(lease)] += 1
    invariant(held.keys() == left.keys(), f"the leases {sorted(held.keys() ^ left.keys())} are never given back")


_PLACES = ("", HOME, WRITTEN)
_MOVES = ("READ", "UPLOAD", "DOWNLOAD")  # whose amounts are bytes
# A subgroup's share of a unit's bytes has a share of what its arrays are padded with to whole pages; its slab has not.
_PADDING = 8 * PAGE


def _refuse(position: int, op: Op, why: str) -> None:
    raise InvariantError(f"operation {position} ({op.kind} of unit {op.unit}) {why}")
