"""From a placement to the operations of one step.

Every pass appends to one list. The order of that list matters three ways: lanes run their operations in it, leases of
a pool are granted in it, and running it strictly one by one is always possible; that is why no plan can deadlock (see
plan.check). Fetches are therefore emitted as early as a slab is free, and no earlier.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from spillway.plan.pools import SlabNames
from spillway.spec.errors import invariant
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Op, Placement, Plan, Pool

NO_UNIT = -1
HOME = "home"
WRITTEN = "written"  # the unit as this step has written it


@dataclass(frozen=True, slots=True)
class _Use:
    """A forward or backward on the compute lane: what the window has to serve."""

    call: int
    unit: int
    backward: bool


@dataclass(slots=True)
class _Load:
    """A residency of a unit in a slot: fetched once, used until `last`."""

    unit: int
    number: int
    last: int
    slot: str = ""
    read: int | None = None
    upload: int | None = None


@dataclass(slots=True)
class _Builder:
    """The growing list, and which slabs are free if everything listed so far has run."""

    pools: dict[str, Pool]
    ops: list[Op] = field(default_factory=list)
    free: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = {name: pool.count for name, pool in self.pools.items()}

    def has_room(self, pool: str) -> bool:
        return self.free[pool] > 0

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
    ) -> int:
        for pool, lease in take:
            invariant(self.free[pool] > 0, f"lowering took a slab of {pool} that cannot be free")
            self.free[pool] -= 1
            self.held[lease] = pool
        for lease in give:
            self.free[self.held.pop(lease)] += 1
        known = tuple(sorted({dep for dep in deps if dep is not None}))
        op = Op(len(self.ops), kind, lane, unit, group, amount, known, take, give, source, target, call, start, stop)
        self.ops.append(op)
        return op.id


class Lowering:
    """Writes one forward and backward of a placement. `final`: it ends a step; otherwise it only accumulates gradients.
    `due`: units whose update was deferred to it."""

    def __init__(
        self,
        model: ModelProfile,
        placement: Placement,
        names: SlabNames,
        pools: tuple[Pool, ...],
        final: bool,
        due: Iterable[int],
    ) -> None:
        self._model = model
        self._plan = placement
        self._names = names
        self._final = final
        self._build = _Builder({pool.name: pool for pool in pools})
        self._uses = self._list_uses()
        self._loads, self._load_of_use = self._list_loads()
        self._next_read = 0
        self._next_upload = 0
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._act_stored: dict[int, int] = {}
        self._act_downloads: list[int] = []
        self._act_read: dict[int, int] = {}
        self._act_uploaded: dict[int, int] = {}
        self._act_order = [use.call for use in self._uses if use.backward and self._moves_act(use.call)]
        self._next_act_read = 0
        self._next_act_upload = 0
        self._due = set(due)
        self._renewed: dict[int, int] = {}  # unit -> the operation after which its new weights may be fetched
        self._norms: list[int] = []
        self._grad_landed: dict[int, int] = {}
        self._ends: list[int] = []
        self._committed: int | None = None

    def run(self) -> tuple[Op, ...]:
        """The list. Raises InvariantError if a pool is too small for even one operation at a time."""
        turn = len(self._uses) // 2
        deferred = bool(self._due)
        self._catch_up_resident()
        for position, use in enumerate(self._uses[:turn]):
            self._fetch_ahead(position)
            self._emit_forward(position, use)
        if deferred:
            self._emit_rest_of_due()
        for position, use in enumerate(self._uses[turn:], start=turn):
            self._fetch_ahead(position)
            self._emit_backward(position, use)
        self._emit_resident()
        if self._final:
            self._emit_end()
        return tuple(self._build.ops)

    def flush(self) -> tuple[Op, ...]:
        """The updates that are due, by themselves."""
        self._emit_rest_of_due()
        return tuple(self._build.ops)

    def _emit_end(self) -> None:
        """With the last backward of a step: the updates that waited for it, or, where they are deferred, the norm."""
        if self._plan.update == "deferred":
            self._emit_norm()
            return
        if self._plan.update == "serial":
            self._emit_serial_updates()
        last = len(self._build.ops) - 1
        self._commit([*self._ends, *([last] if last >= 0 else [])])

    def _commit(self, ends: list[int | None]) -> None:
        self._committed = self._build.add("COMMIT", "write", NO_UNIT, "none", 0, ends)

    # Deferred updates #

    def _catch_up(self, unit: int) -> None:
        """Before the first use of a unit: the update with the last step's gradient."""
        if unit in self._due:
            self._due.remove(unit)
            self._renewed[unit] = self._emit_update(unit, None, HOME)

    def _catch_up_resident(self) -> None:
        """Parameters outside any unit may be used from the first line of the user's forward."""
        unit = self._model.resident_unit
        if unit is not None and unit in self._due:
            self._catch_up(unit)
            self._build.add("FORWARD", "compute", unit, "none", 0, [self._renewed[unit]], (), (), HOME)

    def _emit_rest_of_due(self) -> None:
        for unit in sorted(self._due):
            self._catch_up(unit)
        self._commit([*self._ends])

    def _newest(self, unit: int) -> str:
        return WRITTEN if unit in self._renewed else HOME

    # Weights: the window and its fetches #

    def _list_uses(self) -> list[_Use]:
        calls = [(index, call.unit) for index, call in enumerate(self._model.calls)]
        forward = [_Use(index, unit, False) for index, unit in calls]
        return forward + [_Use(index, unit, True) for index, unit in reversed(calls)]

    def _list_loads(self) -> tuple[list[_Load], dict[int, _Load]]:
        """Residencies in the order they are needed. After a use a unit stays in its slot exactly if it is among the
        next `window` units of its pool: the slots always hold what comes next, so the turn from forward to backward
        fetches nothing twice and capacity is never exceeded."""
        loads: list[_Load] = []
        of_use: dict[int, _Load] = {}
        current: dict[int, _Load] = {}
        for position, use in enumerate(self._uses):
            if self._plan.units[use.unit].weights == "device":
                continue
            load = current.get(use.unit)
            if load is None:
                load = _Load(use.unit, len(loads), position)
                loads.append(load)
                current[use.unit] = load
            load.last = position
            of_use[position] = load
            if not self._among_next(position + 1, use.unit):
                del current[use.unit]
        return loads, of_use

    def _among_next(self, position: int, unit: int) -> bool:
        pool = self._names.slot(unit)
        seen: set[int] = set()
        for use in self._uses[position:]:
            if use.unit == unit:
                return len(seen) < self._build.pools[pool].count
            if self._plan.units[use.unit].weights != "device" and self._names.slot(use.unit) == pool:
                seen.add(use.unit)
                if len(seen) >= self._build.pools[pool].count:
                    return False
        return False

    def _fetch_ahead(self, position: int) -> None:
        """Emit every fetch there is room for, and by all means those that this use waits for."""
        progress = True
        while progress:
            progress = self._try_read() or self._try_upload()
            progress = self._try_act_read() or self._try_act_upload() or progress
        load = self._load_of_use.get(position)
        invariant(load is None or load.upload is not None, "a pool of the window is too small for one unit")

    def _try_read(self) -> bool:
        while self._next_read < len(self._loads):
            load = self._loads[self._next_read]
            if self._plan.units[load.unit].weights != "disk":
                self._next_read += 1
                continue
            if self._is_handed_over(load.unit):
                return self._try_hand_over(load)
            pool = self._names.weight(load.unit)
            if not self._build.has_room(pool):
                return False
            self._catch_up(load.unit)
            size, renewed = self._model.units[load.unit].weight_bytes, self._renewed.get(load.unit)
            lease, source = f"w{load.unit}.{load.number}", self._newest(load.unit)
            load.read = self._build.add(
                "READ", "read", load.unit, "weight", size, [renewed], ((pool, lease),), (), source, lease
            )
            self._next_read += 1
            return True
        return False

    def _is_handed_over(self, unit: int) -> bool:
        """Whether the new weights of a deferred update go to the device from where they were updated, instead of by way
        of the disk."""
        profile = self._model.units[unit]
        whole = profile.num_trainable == profile.num_params
        return unit in self._due and whole and self._plan.units[unit].weights == "disk"

    def _try_hand_over(self, load: _Load) -> bool:
        pool = self._names.slot(load.unit)
        if self._next_upload != self._next_read or not self._build.has_room(pool):
            return False
        self._due.remove(load.unit)
        load.slot = f"s{load.unit}.{load.number}"
        self._renewed[load.unit] = self._emit_update(load.unit, None, HOME, load)
        self._next_read += 1
        self._next_upload += 1
        return True

    def _try_upload(self) -> bool:
        if self._next_upload >= len(self._loads):
            return False
        load = self._loads[self._next_upload]
        if self._is_handed_over(load.unit):
            return False
        pool = self._names.slot(load.unit)
        from_disk = self._plan.units[load.unit].weights == "disk"
        if not self._build.has_room(pool) or (from_disk and load.read is None):
            return False
        self._catch_up(load.unit)
        load.slot = f"s{load.unit}.{load.number}"
        staged = f"w{load.unit}.{load.number}"
        load.upload = self._build.add(
            "UPLOAD",
            "upload",
            load.unit,
            "weight",
            self._model.units[load.unit].weight_bytes,
            [load.read, None if from_disk else self._renewed.get(load.unit)],
            ((pool, load.slot),),
            (staged,) if from_disk else (),
            staged if from_disk else HOME,
            load.slot,
        )
        self._next_upload += 1
        return True

    def _slot_of(self, position: int) -> tuple[str, int | None, tuple[str, ...]]:
        """Where the unit of this use lies, the upload to wait for, and the lease that ends with it."""
        load = self._load_of_use.get(position)
        if load is None:
            return HOME, None, ()
        return load.slot, load.upload, (load.slot,) if load.last == position else ()

    # Activations #

    def _moves_act(self, call: int) -> bool:
        return self._plan.acts[call] != "device" and self._model.calls[call].act_bytes > 0

    def _earlier_store(self) -> int | None:
        """The last download but one: no more than two inputs wait on the device to be taken away."""
        return self._act_downloads[-2] if len(self._act_downloads) > 1 else None

    def _emit_act_store(self, call: int) -> None:
        size = self._model.calls[call].act_bytes
        unit = self._model.calls[call].unit
        pool, lease = self._names.act(call), f"a{call}"
        down = self._build.add(
            "DOWNLOAD", "download", unit, "act", size, [self._forward[call]], ((pool, lease),), (), "", lease, call
        )
        self._act_downloads.append(down)
        self._act_stored[call] = down
        if self._plan.acts[call] == "disk":
            self._act_stored[call] = self._build.add(
                "WRITE", "write", unit, "act", size, [down], (), (lease,), lease, HOME, call
            )

    def _try_act_read(self) -> bool:
        while self._next_act_read < len(self._act_order):
            call = self._act_order[self._next_act_read]
            if self._plan.acts[call] != "disk":
                self._next_act_read += 1
                continue
            pool = self._names.act(call)
            if call not in self._act_stored or not self._build.has_room(pool):
                return False
            model_call = self._model.calls[call]
            self._act_read[call] = self._build.add(
                "READ",
                "read",
                model_call.unit,
                "act",
                model_call.act_bytes,
                [self._act_stored[call]],
                ((pool, f"ar{call}"),),
                (),
                HOME,
                f"ar{call}",
                call,
            )
            self._next_act_read += 1
            return True
        return False

    def _try_act_upload(self) -> bool:
        if self._next_act_upload >= len(self._act_order):
            return False
        call = self._act_order[self._next_act_upload]
        pool = self._names.act_slot(call)
        from_disk = self._plan.acts[call] == "disk"
        ready = self._act_read.get(call) if from_disk else self._act_stored.get(call)
        if ready is None or not self._build.has_room(pool):
            return False
        model_call = self._model.calls[call]
        staged = f"ar{call}" if from_disk else f"a{call}"
        self._act_uploaded[call] = self._build.add(
            "UPLOAD",
            "upload",
            model_call.unit,
            "act",
            model_call.act_bytes,
            [ready],
            ((pool, f"as{call}"),),
            (staged,),
            staged,
            f"as{call}",
            call,
        )
        self._next_act_upload += 1
        return True

    # Compute #

    def _emit_forward(self, position: int, use: _Use) -> None:
        call = self._model.calls[use.call]
        self._catch_up(use.unit)  # those that are fetched were before
        slot, upload, give = self._slot_of(position)
        self._forward[use.call] = self._build.add(
            call.kind,
            "compute",
            use.unit,
            "none",
            call.flops,
            [upload, self._earlier_store(), self._renewed.get(use.unit) if upload is None else None],
            (),
            give,
            slot,
            "",
            use.call,
        )
        if self._moves_act(use.call):
            self._emit_act_store(use.call)

    def _emit_backward(self, position: int, use: _Use) -> None:
        call = self._model.calls[use.call]
        unit = self._model.units[use.unit]
        slot, upload, give = self._slot_of(position)
        first, last = self._is_first_backward(use), self._is_last_backward(use)
        stays = self._plan.units[use.unit].states == "device"
        grads = HOME if stays else f"gs{use.unit}"
        leased = unit.num_trainable > 0 and not stays
        take = ((self._names.grad_slot(use.unit), grads),) if first and leased else ()
        act = self._act_uploaded.get(use.call)
        if act is not None:
            give = (*give, f"as{use.call}")
        # Recomputation and the two products of backward: three times the forward.
        self._backward[use.call] = self._build.add(
            "BACKWARD",
            "compute",
            use.unit,
            "none",
            3 * call.flops,
            [upload, act, self._forward[use.call]],
            take,
            give,
            slot,
            grads if unit.num_trainable else "",
            use.call,
        )
        if last and unit.num_trainable:
            self._emit_gradient(use.unit, [self._backward[use.call]], (grads,) if leased else (), grads)

    def _is_first_backward(self, use: _Use) -> bool:
        return use.call == max(index for index, call in enumerate(self._model.calls) if call.unit == use.unit)

    def _is_last_backward(self, use: _Use) -> bool:
        return use.call == min(index for index, call in enumerate(self._model.calls) if call.unit == use.unit)

    def _emit_resident(self) -> None:
        """Parameters outside any unit gather gradients all through backward."""
        unit = self._model.resident_unit
        if unit is None or not self._model.units[unit].num_trainable:
            return
        done = self._build.add(
            "BACKWARD", "compute", unit, "none", 0, list(self._backward.values()), (), (), HOME, HOME
        )
        self._emit_gradient(unit, [done], (), HOME)

    # Gradients and updates #

    def _emit_gradient(self, unit: int, deps: list[int | None], give: tuple[str, ...], source: str) -> None:
        """DOWNLOAD, and with what is wanted of it: ACCUMULATE, NORM, spill to disk, or the update at once."""
        plan, size = self._plan, self._model.units[unit].grad_bytes
        if plan.units[unit].states == "device":
            self._emit_norm_and_update(unit, deps, HOME)
            return
        pooled = not plan.waits_for_norm or plan.units[unit].grads == "disk" or plan.accumulation > 1
        lease = f"g{unit}"
        take = ((self._names.grad(unit), lease),) if pooled else ()
        target = lease if pooled else HOME
        landed = self._build.add("DOWNLOAD", "download", unit, "grad", size, deps, take, give, source, target)
        if plan.accumulation > 1:
            landed = self._build.add("ACCUMULATE", "update", unit, "grad", size, [landed], (), (lease,), lease, HOME)
            target = HOME
        self._emit_norm_and_update(unit, [landed], target)

    def _emit_norm_and_update(self, unit: int, landed: list[int | None], target: str) -> None:
        if not self._final:
            return
        size = self._model.units[unit].grad_bytes
        norm = self._build.add("NORM", "update", unit, "grad", size, landed, (), (), target, "")
        self._norms.append(norm)
        self._grad_landed[unit] = norm
        if self._plan.units[unit].grads == "disk":
            self._grad_landed[unit] = self._build.add(
                "WRITE", "write", unit, "grad", size, [norm], (), (target,), target, HOME
            )
        elif not self._plan.waits_for_norm:
            self._emit_update(unit, norm, target)

    def _emit_norm(self) -> int:
        """The global norm: from here on it is known how gradients are scaled."""
        return self._build.add("NORM", "update", NO_UNIT, "grad", 0, [*self._norms, self._committed])

    def _emit_serial_updates(self) -> None:
        barrier = self._emit_norm()
        for unit in range(len(self._model.units)):
            if unit in self._grad_landed:
                self._emit_update(unit, barrier, HOME)

    def _emit_update(self, unit: int, ready: int | None, grads: str, load: _Load | None = None) -> int:
        """Returns the operation after which the new weights are where the unit's weights rest. `load`: the residency
        that gets them straight from the slabs."""
        plan, where, profile = self._plan, self._plan.units[unit], self._model.units[unit]
        read_bytes, write_bytes = state_traffic(where, profile.weight_bytes, profile.state_bytes, profile.grad_bytes)
        leased = (grads,) if grads != HOME else ()
        last_update, at_rest = ready, ready
        for start, stop in subgroups(profile.num_trainable, plan.subgroup, "disk" in (where.states, where.weights)):
            share = (stop - start) / profile.num_trainable
            final = (*leased,) if stop == profile.num_trainable else ()
            lease = f"st{unit}.{start}"
            staged = bool(read_bytes or write_bytes)
            fetched = None
            if staged:
                fetched = self._build.add(
                    "READ",
                    "read",
                    unit,
                    "state",
                    share * read_bytes,
                    [self._grad_landed.get(unit)] if where.grads == "disk" else [],
                    (("state", lease),),
                    (),
                    HOME,
                    lease,
                    start=start,
                    stop=stop,
                )
            last_update = self._build.add(
                "UPDATE",
                "update",
                unit,
                "state",
                stop - start,
                [fetched, ready],
                (),
                () if staged else final,
                grads,
                lease if staged else HOME,
                start=start,
                stop=stop,
            )
            at_rest = last_update
            if load is not None:
                load.upload = self._build.add(
                    "UPLOAD",
                    "upload",
                    unit,
                    "weight",
                    share * profile.weight_bytes,
                    [last_update],
                    ((self._names.slot(unit), load.slot),) if start == 0 else (),
                    (),
                    lease,
                    load.slot,
                    start=start,
                    stop=stop,
                )
            self._ends.append(last_update)
            if staged:
                written = self._build.add(
                    "WRITE",
                    "write",
                    unit,
                    "state",
                    share * write_bytes,
                    [last_update, load.upload if load is not None else None],
                    (),
                    (lease, *final),
                    lease,
                    HOME,
                    start=start,
                    stop=stop,
                )
                self._ends.append(written)
                at_rest = written if where.weights == "disk" else last_update
        invariant(last_update is not None and at_rest is not None, f"unit {unit} has nothing to update")
        if last_update is None or at_rest is None:
            raise AssertionError
        if where.weights == "device" and where.states != "device":
            return self._emit_refresh(unit, last_update)
        return at_rest

    def _emit_refresh(self, unit: int, updated: int) -> int:
        """Weights that live on the device are fetched again once their new values are at rest."""
        size, lease, read = self._model.units[unit].weight_bytes, f"w{unit}.new", None
        from_disk = self._plan.units[unit].states == "disk"
        if from_disk:
            written = self._ends[-1]
            take = (("refresh", lease),)
            read = self._build.add("READ", "read", unit, "weight", size, [written], take, (), WRITTEN, lease)
        upload = self._build.add(
            "UPLOAD",
            "upload",
            unit,
            "weight",
            size,
            [updated, read],
            (),
            (lease,) if from_disk else (),
            lease if from_disk else HOME,
            HOME,
        )
        self._ends.append(upload)
        return upload


def subgroups(num_trainable: int, subgroup: int, streamed: bool) -> Iterator[tuple[int, int]]:
    """Element ranges updated by one operation; a unit whose states rest in host memory is updated whole."""
    size = subgroup if streamed else num_trainable
    for start in range(0, num_trainable, size):
        yield start, min(start + size, num_trainable)


def state_traffic(where: object, weight_bytes: int, state_bytes: int, grad_bytes: int) -> tuple[int, int]:
    """Bytes an update of the whole unit reads from and writes to disk.

    Weights that rest on the device or the host are written too where the states are on disk, so that what is on disk is
    always a whole unit of one step.
    """
    weights, states, grads = (getattr(where, part) for part in ("weights", "states", "grads"))
    on_disk = weights == "disk" or (weights == "device" and states == "disk")
    read = (weight_bytes if on_disk else 0) + (state_bytes if states == "disk" else 0)
    write = (weight_bytes if on_disk or states == "disk" else 0) + (state_bytes if states == "disk" else 0)
    return read + (grad_bytes if grads == "disk" else 0), write


def lower(model: ModelProfile, placement: Placement) -> Plan:
    """The plan's pools and lists; what it costs is left out."""
    names = SlabNames(model, placement)
    pools = names.all()
    deferred = placement.update == "deferred"
    trained = [index for index, unit in enumerate(model.units) if unit.num_trainable and deferred]

    def round_of(final: bool, due: Iterable[int]) -> Lowering:
        return Lowering(model, placement, names, pools, final, due)

    flush = round_of(False, trained).flush() if deferred else ()
    if placement.accumulation == 1:
        return Plan(placement, pools, round_of(True, trained).run(), flush_ops=flush)
    begin = round_of(False, trained).run() if deferred else ()
    return Plan(placement, pools, round_of(True, ()).run(), round_of(False, ()).run(), begin, flush)
