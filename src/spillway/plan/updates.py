"""What becomes of gradients: how they land, when each unit is updated, and when a step is committed."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from spillway.plan.build import NO_UNIT, Builder
from spillway.plan.pools import SlabNames
from spillway.spec.errors import required
from spillway.spec.model import ModelProfile, UnitProfile
from spillway.spec.plan import HOME, WRITTEN, Placement, UnitPlacement


@dataclass(frozen=True, slots=True)
class Round:
    """One forward and backward. `ends`: with it an optimizer step is complete; otherwise it only accumulates. `begins`:
    no gradients of the step went before. `due`: units whose update with the last step's gradients belongs to its
    forward. `now`: units that are updated as soon as their gradient has landed. `ahead`: how many subgroups of the
    first updates that are due it reads for the next list like it; `is_warm`: and finds read."""

    ends: bool
    begins: bool = True
    due: frozenset[int] = frozenset()
    now: frozenset[int] = frozenset()
    ahead: int = 0
    is_warm: bool = False


@dataclass(slots=True)
class Slot:
    """Where the weights of an update go at once: the lease in the window, and the upload that fills it."""

    lease: str
    upload: int | None = None


class Updates:
    """Writes gradients, updates and commits into the list of one round."""

    def __init__(
        self, build: Builder, model: ModelProfile, placement: Placement, names: SlabNames, round_: Round
    ) -> None:
        self._build = build
        self._model = model
        self._plan = placement
        self._names = names
        self._round = round_
        self._due = set(round_.due)
        self._renewed: dict[int, int] = {}  # unit -> the operation after which its new weights may be fetched
        self._ends: list[int | None] = []
        self._norms: list[int | None] = []
        self._grad_landed: dict[int, int] = {}
        self._committed: int | None = None  # of the step before
        self._written: int | None = None  # the last write of an update
        # What the list before reads ahead, if it does: of the first updates that are due, in their order.
        self._ahead: list[tuple[int, int, int, float, str]] = []
        self._put_away: dict[str, int] = {}  # lease of a late update -> the write of what it holds
        self._next_ahead = 0

    # Updates of the step before #

    def catch_up(self, unit: int) -> None:
        """Before the first use of a unit: its update, if it is due."""
        if unit in self._due:
            self._due.remove(unit)
            self._renewed[unit] = self._emit(unit, None, HOME, late=True)

    def catch_up_residents(self) -> None:
        """Parameters that are used outside of calls may be so from the first line of the user's forward."""
        for unit in sorted(self._model.resident_units.intersection(self._due)):
            self.catch_up(unit)
            self._build.add("FORWARD", "compute", unit, "none", 0, [self._renewed[unit]], (), (), HOME)

    def hands_over(self, unit: int) -> bool:
        """Whether the weights of a due update go to the device from where they were updated, instead of by way of the
        disk."""
        profile = self._model.units[unit]
        whole = profile.grad_bytes == profile.weight_bytes  # counts of elements leave padding out
        where = self._plan.units[unit]
        return unit in self._due and whole and where.weights == "disk" and not where.visits

    def hand_over(self, unit: int, lease: str) -> int | None:
        """The due update of a unit, straight into a slot of the window. Returns the upload that fills it."""
        self._due.remove(unit)
        slot = Slot(lease)
        self._renewed[unit] = self._emit(unit, None, HOME, late=True, slot=slot)
        return slot.upload

    def end_forward(self) -> None:
        """Every update that is due and not used in this forward; then the step before is committed."""
        for unit in sorted(self._due):
            self.catch_up(unit)
        if self._round.due:
            self._committed = self._build.add("COMMIT", "write", NO_UNIT, "none", 0, self._ends, late=True)
            self._ends = []

    def renewed(self, unit: int) -> int | None:
        """The operation after which this round's weights of the unit may be fetched; None where they are at rest."""
        return self._renewed.get(unit)

    @property
    def newest(self) -> str:
        """Which place on disk weights are fetched from."""
        return WRITTEN if self._round.due else HOME

    def read_ahead(self, share: float) -> None:
        """So large a share of the states that the first updates of the next list need, which finds them in their
        slabs."""
        while self._next_ahead < share * len(self._ahead):
            unit, start, stop, amount, lease = self._ahead[self._next_ahead]
            put_away, take = self._put_away[lease], (("state", lease),)
            self._build.add(
                "READ", "read", unit, "state", amount, [put_away], take, (), WRITTEN, lease, -1, start, stop
            )
            self._next_ahead += 1

    @property
    def kept(self) -> tuple[tuple[str, str], ...]:
        """The leases that the list leaves to the next one, with their pools."""
        return tuple(("state", lease) for *_, lease in self._ahead[: self._next_ahead])

    # Gradients of this round #

    def gradient(self, unit: int, deps: list[int | None], give: tuple[str, ...], source: str) -> None:
        """DOWNLOAD, and with what is wanted of it: ACCUMULATE, NORM, spill to disk, or the update at once."""
        plan, size = self._plan, self._model.units[unit].grad_bytes
        if plan.units[unit].states == "device":
            if self._names.sums_on_device(unit):
                deps = [self._build.add("ACCUMULATE", "device", unit, "grad", size, deps, (), give, source, HOME)]
            self._norm_and_update(unit, deps, HOME)
            return
        pooled = self._names.lands_in_slab(unit)
        lease = f"g{unit}"
        take = ((self._names.grad(unit), lease),) if pooled else ()
        target = lease if pooled else HOME
        landed = self._build.add("DOWNLOAD", "download", unit, "grad", size, deps, take, give, source, target)
        if plan.accumulation > 1:
            landed, target = self._accumulate(unit, landed, lease)
        self._norm_and_update(unit, [landed], target)

    def _accumulate(self, unit: int, landed: int, lease: str) -> tuple[int, str]:
        """Add what has landed in a lease to what came before. Returns the operation, and where the sum is."""
        size, add = self._model.units[unit].grad_bytes, self._build.add
        if not self._names.sums_in_slab(unit):
            return add("ACCUMULATE", "update", unit, "grad", size, [landed], (), (lease,), lease, HOME), HOME
        total, read = f"gt{unit}", None
        take = ((self._names.grad_sum(unit), total),)
        if not self._round.begins:
            read = add("READ", "read", unit, "grad", size, [], take, (), HOME, total)
        deps, first = [landed, read], take if read is None else ()
        return add("ACCUMULATE", "update", unit, "grad", size, deps, first, (lease,), lease, total), total

    def _norm_and_update(self, unit: int, landed: list[int | None], target: str) -> None:
        size, where = self._model.units[unit].grad_bytes, self._plan.units[unit]
        if self._round.ends:
            lane = "device" if where.states == "device" else "update"
            norm = self._build.add("NORM", lane, unit, "grad", size, landed, (), (), target, "")
            landed = [norm]
            self._norms.append(norm)
            self._grad_landed[unit] = norm
            if unit in self._round.now:
                self._emit(unit, norm, target)
        if where.grads == "disk":
            written = self._build.add("WRITE", "write", unit, "grad", size, landed, (), (target,), target, HOME)
            if self._round.ends:
                self._grad_landed[unit] = written

    def end(self) -> None:
        """With the last backward of a step: the norm where anything waits for it, what is updated after it, and the
        commit, unless the next forward has updates to make first."""
        if not self._round.ends:
            return
        later = set(self._grad_landed) - self._round.now
        serial = self._plan.update == "serial"
        norm = self._norm() if later or self._plan.clip else None
        if serial:
            for unit in sorted(later):
                self._emit(unit, norm, HOME)
        if serial or not later:
            last = len(self._build.ops) - 1
            self._build.add("COMMIT", "write", NO_UNIT, "none", 0, [*self._ends, *([last] if last >= 0 else [])])

    def _norm(self) -> int:
        """The global norm: from here on it is known how gradients are scaled."""
        return self._build.add("NORM", "update", NO_UNIT, "grad", 0, [*self._norms, self._committed])

    # One update #

    def _emit(self, unit: int, ready: int | None, grads: str, late: bool = False, slot: Slot | None = None) -> int:
        """READ, UPDATE and WRITE of each subgroup. Returns the operation after which the new weights are where the
        unit's weights rest."""
        where, profile = self._plan.units[unit], self._model.units[unit]
        streamed = where.visits or "disk" in (where.states, where.weights, where.grads)
        at_rest = ready
        for start, stop in subgroups(profile.num_trainable, self._plan.subgroup, streamed):
            give = (grads,) if grads != HOME and stop == profile.num_trainable else ()
            at_rest = self._subgroup(unit, start, stop, ready, grads, give, late, slot)
        at_rest = required(at_rest, f"unit {unit} has nothing to update")
        if where.weights == "device" and where.states != "device":
            return self._refresh(unit, at_rest, late)
        return at_rest

    def _subgroup(
        self,
        unit: int,
        start: int,
        stop: int,
        ready: int | None,
        grads: str,
        give: tuple[str, ...],
        late: bool,
        slot: Slot | None,
    ) -> int:
        where, profile = self._plan.units[unit], self._model.units[unit]
        read_bytes, write_bytes = state_traffic(where, profile)
        share = (stop - start) / profile.num_trainable
        staged = bool(read_bytes or write_bytes)
        lease, fetched = f"st{unit}.{start}{'.late' if late else ''}", None
        place = lease if staged else HOME
        add = partial(self._build.add, start=start, stop=stop, late=late)
        if staged:
            deps = [self._grad_landed.get(unit) if where.grads == "disk" else None, self._committed]
            if self._plan.update == "overlap-naive":
                deps.append(self._written)
            amount, take = share * read_bytes, (("state", lease),)
            is_ahead = late and len(self._ahead) < self._round.ahead
            if is_ahead:
                self._ahead.append((unit, start, stop, amount, lease))
            if is_ahead and self._round.is_warm:
                self._build.find("state", lease)
            else:
                fetched = add("READ", "read", unit, "state", amount, deps, take, (), HOME, place)
        handed, after = () if staged else give, [fetched, ready]
        if where.visits:
            updated = self._visit(unit, start, stop, after, handed, grads, place, late)
        else:
            updated = add("UPDATE", where.update_lane, unit, "state", stop - start, after, (), handed, grads, place)
        self._ends.append(updated)
        if slot is not None:
            amount, first = share * profile.weight_bytes, ((self._names.slot(unit), slot.lease),)
            slot.upload = add(
                "UPLOAD", "upload", unit, "weight", amount, [updated], () if start else first, (), place, slot.lease
            )
        if not staged:
            return updated
        deps = [updated, slot.upload if slot is not None else None]
        written = add("WRITE", "write", unit, "state", share * write_bytes, deps, (), (lease, *give), place, HOME)
        self._written = self._put_away[lease] = written
        self._ends.append(written)
        return updated if where.weights == "host" else written

    def _visit(
        self,
        unit: int,
        start: int,
        stop: int,
        ready: list[int | None],
        handed: tuple[str, ...],
        grads: str,
        place: str,
        late: bool,
    ) -> int:
        """The update of a subgroup on the device: there and back (Deep Optimizer States). Returns the way back."""
        profile = self._model.units[unit]
        share, slot = (stop - start) / profile.num_trainable, f"dv{unit}.{start}{'.late' if late else ''}"
        add = partial(self._build.add, unit=unit, start=start, stop=stop, late=late)
        states = share * profile.updated_bytes
        take = (("state-slot", slot),)
        there = add("UPLOAD", "upload", group="state", amount=states, deps=ready, take=take, source=place, target=slot)
        with_grad = add(
            "UPLOAD",
            "upload",
            group="grad",
            amount=share * profile.grad_bytes,
            deps=[there],
            give=handed,
            source=place if self._plan.units[unit].grads == "disk" else grads,
            target=slot,
        )
        updated = add("UPDATE", "device", group="state", amount=stop - start, deps=[with_grad], target=slot)
        return add(
            "DOWNLOAD",
            "download",
            group="state",
            amount=states,
            deps=[updated],
            give=(slot,),
            source=slot,
            target=place,
        )

    def _refresh(self, unit: int, at_rest: int, late: bool) -> int:
        """Weights that live on the device are fetched again once their new values are at rest."""
        size, lease, read, add = self._model.units[unit].weight_bytes, f"w{unit}.new", None, self._build.add
        from_disk = self._plan.units[unit].states == "disk"
        if from_disk:
            take = (("refresh", lease),)
            read = add("READ", "read", unit, "weight", size, [at_rest], take, (), WRITTEN, lease, late=late)
        give, source = ((lease,), lease) if from_disk else ((), HOME)
        upload = add("UPLOAD", "upload", unit, "weight", size, [at_rest, read], (), give, source, HOME, late=late)
        self._ends.append(upload)
        return upload


def subgroups(num_trainable: int, subgroup: int, streamed: bool) -> Iterator[tuple[int, int]]:
    """Element ranges updated by one operation; a unit whose states rest in host memory is updated whole."""
    size = subgroup if streamed else num_trainable
    for start in range(0, num_trainable, size):
        yield start, min(start + size, num_trainable)


def state_traffic(where: UnitPlacement, unit: UnitProfile) -> tuple[int, int]:
    """Bytes an update of the whole unit reads from and writes to disk.

    Weights that rest on the device or the host are written too where the states are on disk, so that what is on disk is
    always a whole unit of one step. Frozen ones are neither read nor written.
    """
    states = unit.state_bytes if where.states == "disk" else 0
    read = (unit.trained_bytes if where.updates_disk_weights else 0) + states
    write = (unit.trained_bytes if where.updates_disk_weights or where.states == "disk" else 0) + states
    return read + (unit.grad_bytes if where.grads == "disk" else 0), write
