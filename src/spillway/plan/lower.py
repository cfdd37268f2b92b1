"""From a placement to the operations of one step.

Every pass appends to one list. The order of that list matters three ways: lanes run their operations in it, leases of
a pool are granted in it, and running it strictly one by one is always possible; that is why no plan can deadlock (see
plan.check). Fetches are therefore emitted as early as a slab is free, and no earlier.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from spillway.plan.pools import SlabNames
from spillway.spec.errors import invariant
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Op, Placement, Pool

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
    """Writes the step of one placement. `final` is False for a step that only accumulates gradients."""

    def __init__(
        self, model: ModelProfile, placement: Placement, names: SlabNames, pools: tuple[Pool, ...], final: bool
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
        self._norms: list[int] = []
        self._grad_landed: dict[int, int] = {}
        self._ends: list[int] = []

    def run(self) -> tuple[Op, ...]:
        """The list. Raises InvariantError if a pool is too small for even one operation at a time."""
        for position, use in enumerate(self._uses):
            self._fetch_ahead(position)
            if use.backward:
                self._emit_backward(position, use)
            else:
                self._emit_forward(position, use)
        self._emit_resident()
        if self._final:
            if self._plan.update == "serial":
                self._emit_serial_updates()
            self._build.add("COMMIT", "write", NO_UNIT, "none", 0, self._all_ends())
        return tuple(self._build.ops)

    def _all_ends(self) -> list[int | None]:
        """What a step's end waits for: everything at rest, and the last operation where nothing is updated."""
        last = len(self._build.ops) - 1
        return [*self._ends, *([last] if last >= 0 else [])]

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
            pool = self._names.weight(load.unit)
            if not self._build.has_room(pool):
                return False
            size = self._model.units[load.unit].weight_bytes
            lease = f"w{load.unit}.{load.number}"
            load.read = self._build.add(
                "READ", "read", load.unit, "weight", size, [], ((pool, lease),), (), HOME, lease
            )
            self._next_read += 1
            return True
        return False

    def _try_upload(self) -> bool:
        if self._next_upload >= len(self._loads):
            return False
        load = self._loads[self._next_upload]
        pool = self._names.slot(load.unit)
        from_disk = self._plan.units[load.unit].weights == "disk"
        if not self._build.has_room(pool) or (from_disk and load.read is None):
            return False
        load.slot = f"s{load.unit}.{load.number}"
        staged = f"w{load.unit}.{load.number}"
        load.upload = self._build.add(
            "UPLOAD",
            "upload",
            load.unit,
            "weight",
            self._model.units[load.unit].weight_bytes,
            [load.read],
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
        slot, upload, give = self._slot_of(position)
        self._forward[use.call] = self._build.add(
            call.kind,
            "compute",
            use.unit,
            "none",
            call.flops,
            [upload, self._earlier_store()],
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
        pooled = plan.update == "overlap" or plan.units[unit].grads == "disk" or plan.accumulation > 1
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
        elif self._plan.update == "overlap":
            self._emit_update(unit, norm, target)

    def _emit_serial_updates(self) -> None:
        barrier = self._build.add("NORM", "update", NO_UNIT, "grad", 0, list(self._norms))
        for unit in range(len(self._model.units)):
            if unit in self._grad_landed:
                self._emit_update(unit, barrier, HOME)

    def _emit_update(self, unit: int, ready: int, grads: str) -> None:
        plan, where, profile = self._plan, self._plan.units[unit], self._model.units[unit]
        read_bytes, write_bytes = state_traffic(where, profile.weight_bytes, profile.state_bytes, profile.grad_bytes)
        leased = (grads,) if grads != HOME else ()
        last_update = ready
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
                    [self._grad_landed[unit]] if where.grads == "disk" else [],
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
            self._ends.append(last_update)
            if staged:
                self._ends.append(
                    self._build.add(
                        "WRITE",
                        "write",
                        unit,
                        "state",
                        share * write_bytes,
                        [last_update],
                        (),
                        (lease, *final),
                        lease,
                        HOME,
                        start=start,
                        stop=stop,
                    )
                )
        if where.weights == "device" and where.states != "device":
            self._emit_refresh(unit, last_update)

    def _emit_refresh(self, unit: int, updated: int) -> None:
        """Weights that live on the device are fetched again once their new values are at rest."""
        size, lease, read = self._model.units[unit].weight_bytes, f"w{unit}.new", None
        from_disk = self._plan.units[unit].states == "disk"
        if from_disk:
            written = self._ends[-1]
            take = (("refresh", lease),)
            read = self._build.add("READ", "read", unit, "weight", size, [written], take, (), WRITTEN, lease)
        self._ends.append(
            self._build.add(
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
        )


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


def lower(model: ModelProfile, placement: Placement) -> tuple[tuple[Pool, ...], tuple[Op, ...], tuple[Op, ...]]:
    """Pools, operations of the updating step, and of an accumulating one (empty without accumulation)."""
    names = SlabNames(model, placement)
    pools = names.all()
    ops = Lowering(model, placement, names, pools, final=True).run()
    if placement.accumulation == 1:
        return pools, ops, ()
    return pools, ops, Lowering(model, placement, names, pools, final=False).run()
