"""A list of operations as it grows."""

from dataclasses import dataclass, field

from spillway.spec.errors import invariant
from spillway.spec.plan import Op, Pool

NO_UNIT = -1


@dataclass(slots=True)
class Builder:
    """The growing list, and which slabs are free if everything listed so far has run."""

    pools: dict[str, Pool]
    in_turn: bool = False  # each operation depends on the one before it
    ops: list[Op] = field(default_factory=list)
    free: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = {name: pool.count for name, pool in self.pools.items()}

    def has_room(self, pool: str) -> bool:
        """Whether a slab of the pool is free."""
        return self.free[pool] > 0

    def find(self, pool: str, lease: str) -> None:
        """Count a lease that the list begins with, where an operation first uses it."""
        invariant(self.free[pool] > 0, f"lowering found a slab of {pool} that cannot be there")
        self.free[pool] -= 1
        self.held[lease] = pool

    def add(
        self,
        kind: str,
        lane: str,
        unit: int,
        group: str,
        amount: float,
        deps: list[int | None],
        take: tuple[tuple[str, str], ...] = (),
        give: tuple[str, ...] = (),
        source: str = "",
        target: str = "",
        call: int = -1,
        start: int = 0,
        stop: int = 0,
        late: bool = False,
    ) -> int:
        """Append an operation and count its leases. Returns its number."""
        for pool, lease in take:
            invariant(self.free[pool] > 0, f"lowering took a slab of {pool} that cannot be free")
            self.free[pool] -= 1
            self.held[lease] = pool
        for lease in give:
            self.free[self.held.pop(lease)] += 1
        number = len(self.ops)
        if self.in_turn and number:
            deps = [*deps, number - 1]
        known = tuple(sorted({dep for dep in deps if dep is not None}))
        op = Op(number, kind, lane, unit, group, amount, known, take, give, source, target, call, start, stop, late)
        self.ops.append(op)
        return op.id
