"""From a placement to the operations of one step.

Every pass appends to one list. The order of that list matters three ways: lanes run their operations in it, leases of
a pool are granted in it, and running it strictly one by one is always possible; that is why no plan can deadlock (see
plan.check). Fetches are therefore emitted as early as a slab is free, and no earlier.
"""

from collections.abc import Sequence
from dataclasses import replace

from spillway.plan.build import Builder
from spillway.plan.fetch import Fetches, Use
from spillway.plan.pools import SlabNames, act_lease, recomputed_flops
from spillway.plan.updates import Round, Updates
from spillway.spec.errors import invariant
from spillway.spec.model import ModelProfile
from spillway.spec.plan import HOME, Op, Placement, Plan, Pool


class Lowering:
    """Writes the list of one round of a placement."""

    def __init__(
        self, model: ModelProfile, placement: Placement, names: SlabNames, pools: tuple[Pool, ...], round_: Round
    ) -> None:
        self._model = model
        self._plan = placement
        self._names = names
        self._build = Builder({pool.name: pool for pool in pools}, placement.in_turn)
        self._updates = Updates(self._build, model, placement, names, round_)
        self._uses = self._list_uses()
        self._fetches = Fetches(self._build, model, placement, names, self._updates, self._uses)
        self._last_call = {call.unit: index for index, call in enumerate(model.calls)}
        self._first_call = {call.unit: index for index, call in reversed(list(enumerate(model.calls)))}
        self._forward: dict[int, int] = {}
        self._backward: dict[int, int] = {}
        self._act_downloads: list[int] = []
        self._act_written: dict[int, int] = {}  # of calls whose activations are on disk
        # The operation that brings what is kept of a call to host memory, or back to the device, and its lease there.
        self._act_on_host: dict[int, tuple[int, str]] = {}
        self._act_on_device: dict[int, tuple[int, str]] = {}
        self._act_order = [use.call for use in self._uses if use.backward and self._moves_act(use.call)]
        self._next_act_read = 0
        self._next_act_upload = 0

    def run(self) -> tuple[Op, ...]:
        """The list. Raises InvariantError if a pool is too small for even one operation at a time."""
        turn = len(self._model.calls)
        self._updates.catch_up_residents()
        for position, use in enumerate(self._uses[:turn]):
            self._fetch_ahead(position)
            self._emit_forward(position, use)
        self._updates.end_forward()
        for position, use in enumerate(self._uses[turn:], start=turn):
            self._fetch_ahead(position)
            self._emit_backward(position, use)
            self._updates.read_ahead((position + 1 - turn) / (len(self._uses) - turn))
        self._emit_residents()
        self._updates.end()
        return tuple(self._build.ops)

    @property
    def kept(self) -> tuple[tuple[str, str], ...]:
        """The leases that the list leaves to the next one, with their pools."""
        return self._updates.kept

    def flush(self) -> tuple[Op, ...]:
        """The updates that are due, by themselves."""
        self._updates.end_forward()
        return tuple(self._build.ops)

    def _list_uses(self) -> list[Use]:
        calls = [(index, call.unit) for index, call in enumerate(self._model.calls)]
        forward = [Use(index, unit, False) for index, unit in calls]
        return forward + [
            Use(index, unit, True) for index, unit in reversed(calls) if self._model.calls[index].differentiated
        ]

    def _fetch_ahead(self, position: int) -> None:
        """Emit every fetch there is room for, and by all means those that this use waits for."""
        progress = True
        while progress:
            progress = self._fetches.advance()
            progress = self._try_act_read() or self._try_act_upload() or progress
        invariant(self._fetches.is_there(position), "a pool of the window is too small for one unit")

    # Activations #

    def _moves_act(self, call: int) -> bool:
        return self._plan.acts[call].tier != "device" and self._names.act_bytes(call) > 0

    def _earlier_store(self) -> int | None:
        """The last download but one: no more than two inputs wait on the device to be taken away."""
        return self._act_downloads[-2] if len(self._act_downloads) > 1 else None

    def _emit_act_store(self, call: int) -> None:
        size = self._names.act_bytes(call)
        unit = self._model.calls[call].unit
        pool, lease = self._names.act(call), f"a{call}"
        down = self._build.add(
            "DOWNLOAD", "download", unit, "act", size, [self._forward[call]], ((pool, lease),), (), "", lease, call
        )
        self._act_downloads.append(down)
        if self._plan.acts[call].tier == "disk":
            self._act_written[call] = self._build.add(
                "WRITE", "write", unit, "act", size, [down], (), (lease,), lease, HOME, call
            )
        else:
            self._act_on_host[call] = down, lease

    def _try_act_read(self) -> bool:
        while self._next_act_read < len(self._act_order):
            call = self._act_order[self._next_act_read]
            if self._plan.acts[call].tier != "disk":
                self._next_act_read += 1
                continue
            pool, lease = self._names.act(call), f"ar{call}"
            if call not in self._act_written or not self._build.has_room(pool):
                return False
            read = self._build.add(
                "READ",
                "read",
                self._model.calls[call].unit,
                "act",
                self._names.act_bytes(call),
                [self._act_written[call]],
                ((pool, lease),),
                (),
                HOME,
                lease,
                call,
            )
            self._act_on_host[call] = read, lease
            self._next_act_read += 1
            return True
        return False

    def _try_act_upload(self) -> bool:
        if self._next_act_upload >= len(self._act_order):
            return False
        call = self._act_order[self._next_act_upload]
        pool, lease = self._names.act_slot(call), act_lease(call)
        if call not in self._act_on_host or not self._build.has_room(pool):
            return False
        ready, staged = self._act_on_host[call]
        upload = self._build.add(
            "UPLOAD",
            "upload",
            self._model.calls[call].unit,
            "act",
            self._names.act_bytes(call),
            [ready],
            ((pool, lease),),
            (staged,),
            staged,
            lease,
            call,
        )
        self._act_on_device[call] = upload, lease
        self._next_act_upload += 1
        return True

    # Compute #

    def _emit_forward(self, position: int, use: Use) -> None:
        call = self._model.calls[use.call]
        self._updates.catch_up(use.unit)  # those that are fetched were before
        slot, upload, give = self._fetches.slot_of(position)
        self._forward[use.call] = self._build.add(
            call.kind,
            "compute",
            use.unit,
            "none",
            call.flops,
            [upload, self._earlier_store(), self._updates.renewed(use.unit) if upload is None else None],
            (),
            give,
            slot,
            "",
            use.call,
        )
        if self._moves_act(use.call):
            self._emit_act_store(use.call)

    def _emit_backward(self, position: int, use: Use) -> None:
        call = self._model.calls[use.call]
        unit = self._model.units[use.unit]
        slot, upload, give = self._fetches.slot_of(position)
        first, last = self._is_first_backward(use), self._is_last_backward(use)
        stays = self._plan.units[use.unit].states == "device" and not self._names.sums_on_device(use.unit)
        grads = HOME if stays else f"gs{use.unit}"
        leased = unit.num_trainable > 0 and not stays
        take = ((self._names.grad_slot(use.unit), grads),) if first and leased else ()
        act, brought = self._act_on_device.get(use.call, (None, ""))
        if brought:
            give = (*give, brought)
        flops = self._model.backward_flops(call) + recomputed_flops(call, self._plan.acts[use.call])
        self._backward[use.call] = self._build.add(
            "BACKWARD",
            "compute",
            use.unit,
            "none",
            flops,
            [upload, act, self._forward[use.call]],
            take,
            give,
            slot,
            grads if unit.num_trainable else "",
            use.call,
        )
        if last and unit.num_trainable:
            self._updates.gradient(use.unit, [self._backward[use.call]], (grads,) if leased else (), grads)

    def _is_first_backward(self, use: Use) -> bool:
        return use.call == self._last_call[use.unit]

    def _is_last_backward(self, use: Use) -> bool:
        return use.call == self._first_call[use.unit]

    def _emit_residents(self) -> None:
        """Parameters that are used outside of calls gather gradients all through backward."""
        for unit in sorted(self._model.resident_units):
            if self._model.units[unit].num_trainable:
                done = self._build.add(
                    "BACKWARD", "compute", unit, "none", 0, list(self._backward.values()), (), (), HOME, HOME
                )
                self._updates.gradient(unit, [done], (), HOME)


def lower_step(model: ModelProfile, placement: Placement) -> Plan:
    """The plan's pools and the lists of a whole step; what it costs, and what runs now and then, is left out."""
    return _Lists(model, placement).step()


def wary_step(model: ModelProfile, step: Plan) -> Plan:
    """What `lower_step` gave of a plan that speculates, with the lists of a step that guesses at nothing."""
    return _Lists(model, step.placement).wary(step)


def complete(model: ModelProfile, step: Plan) -> Plan:
    """What `lower_step` gave, with every list."""
    return _Lists(model, step.placement).all(step)


def lower_forward(
    model: ModelProfile, placement: Placement, pools: tuple[Pool, ...], units: Sequence[int]
) -> tuple[Op, ...]:
    """A forward that no backward follows (evaluation, generation), which calls these units in turn: the list fetches
    them through the pools of the step."""
    build, names = Builder({pool.name: pool for pool in pools}, placement.in_turn), SlabNames(model, placement)
    uses = [Use(index, unit, False) for index, unit in enumerate(units)]
    fetches = Fetches(build, model, placement, names, Updates(build, model, placement, names, Round(False)), uses)
    for position, use in enumerate(uses):
        while fetches.advance():
            pass
        slot, upload, give = fetches.slot_of(position)
        build.add("FORWARD", "compute", use.unit, "none", 0, [upload], (), give, slot, "", use.call)
    return tuple(build.ops)


class _Lists:
    """Which rounds a placement is made of."""

    def __init__(self, model: ModelProfile, placement: Placement) -> None:
        self._model = model
        self._placement = placement
        self._names = SlabNames(model, placement)
        self._pools = self._names.all()
        self._trained = frozenset(index for index, unit in enumerate(model.units) if unit.num_trainable)
        self._deferring = frozenset(unit for unit in self._trained if placement.units[unit].defers)

    def step(self) -> Plan:
        now = self._trained - self._deferring if self._placement.overlaps else frozenset()
        if self._placement.accumulation == 1:
            ahead = 0 if self._placement.speculates else self._placement.ahead
            whole = self._round(Round(True, True, self._deferring, now, ahead, is_warm=True))
            return Plan(self._placement, self._pools, whole.run(), kept=whole.kept)
        end, more = self._round(Round(True, False, now=now)).run(), self._round(Round(False, False)).run()
        sums = any(self._names.sums_in_slab(unit) for unit in self._trained)
        begin = self._round(Round(False, due=self._deferring)).run() if self._deferring or sums else ()
        return Plan(self._placement, self._pools, end, more, begin)

    def wary(self, step: Plan) -> Plan:
        if self._placement.accumulation > 1:
            end, begin = self._round(Round(True, False)).run(), self._round(Round(False, due=self._trained)).run()
            return replace(step, wary_ops=end, wary_begin_ops=begin)
        whole = self._round(Round(True, due=self._trained, ahead=self._placement.ahead, is_warm=True))
        return replace(step, wary_ops=whole.run(), kept=whole.kept)

    def all(self, step: Plan) -> Plan:
        speculates = self._placement.speculates
        due = self._trained if speculates else self._deferring
        step = self.wary(step) if speculates else step
        flush = self._round(Round(False, due=due)).flush() if due else ()
        cold = self._round(Round(True, due=due, ahead=self._placement.ahead)).run() if step.kept else ()
        return replace(step, flush_ops=flush, cold_ops=cold)

    def _round(self, round_: Round) -> Lowering:
        return Lowering(self._model, self._placement, self._names, self._pools, round_)
