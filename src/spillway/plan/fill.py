"""Placements within a budget: the deepest pipeline that fits with everything far away, then memory filled with what
saves most."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from spillway.plan.bounds import is_held_up_by_recomputing, lower_bound
from spillway.plan.memory import extents_of_units, peaks
from spillway.plan.pools import Kinds, SlabNames, stored_bytes
from spillway.plan.request import PlanRequest, Space
from spillway.plan.swap import EVERYTHING, Output, best_amount, with_outputs
from spillway.spec.errors import PlanInfeasible
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Kept, Placement, Pool, TierPeaks, UnitPlacement
from spillway.spec.sizes import format_size, format_size_up

# Elements per subgroup and how many are under way: large enough for the drive, small enough that slabs stay cheap. The
# first ones are for budgets of which they are a small share. They are no powers of two: arrays that lie so far apart
# take each other's place in the processor's first cache, and the update becomes a third slower.
_ODD = 3 << 14
_LARGE_SUBGROUPS = tuple((size + _ODD, 4) for size in (1 << 28, 1 << 27, 1 << 26, 1 << 25))
_LARGE_SHARE = 1 / 32
_SUBGROUPS = ((1 << 24, 4), (1 << 23, 4), (1 << 22, 4), (1 << 22, 2), (1 << 20, 2), (1 << 18, 1))
# Of the optimizer states: fewer than that in host memory are not worth losing a saved point at every step.
_WORTHWHILE_SHARE = 0.25
# What is moved nearer, and in which order. The first is that of traffic saved per byte: inputs of units (written and
# read once a step), gradients that wait for the norm, weights (read twice), then states. In the others nothing settles
# on the device, so that no guess is lost, or inputs of units go there before all, or units that are trained there. What
# goes on to the device leaves room in host memory, which is filled again. Where the device's memory is the host's,
# whole units go over to the device at last: they need no slots and are not copied.
_ORDERS = (
    (("inputs", "host"), ("grads", "host"), ("weights", "host"), ("states", "host"), ("weights", "device"),
     ("states", "device"), ("weights", "host"), ("states", "host"), ("inputs", "device"), ("units", "device")),
    (("inputs", "host"), ("grads", "host"), ("weights", "host"), ("states", "host"), ("inputs", "device")),
    (("inputs", "host"), ("inputs", "device"), ("grads", "host"), ("weights", "host"), ("states", "host"),
     ("weights", "device"), ("states", "device"), ("weights", "host"), ("states", "host")),
    (("inputs", "host"), ("inputs", "device"), ("grads", "host"), ("weights", "device"), ("states", "host")),
    (("inputs", "device"), ("grads", "host"), ("weights", "host"), ("states", "host")),
    (("inputs", "host"), ("grads", "host"), ("all", "device"), ("weights", "host"), ("states", "host"),
     ("weights", "device"), ("inputs", "device")),
)  # fmt: skip
# Nothing takes device memory that activations on their way could use.
_OFF_THE_DEVICE = (("inputs", "host"), ("grads", "host"), ("weights", "host"), ("states", "host"))
# Activations are moved off the device in the best of the other placements, by their bounds.
_SWAPPED_FROM = 3
_NEARER = {"disk": ("host", "device"), "host": ("device",), "device": ()}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement, its pools and what it takes of each tier."""

    placement: Placement
    pools: tuple[Pool, ...]
    peaks: TierPeaks


# Changes the unit (or call) of a number for the better; None where there is nothing to change.
Change = Callable[[Placement, int], "UnitPlacement | Kept | None"]


class Filler:
    """Makes candidates for one model, machine, budget and space of choices."""

    def __init__(
        self, model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest, space: Space
    ) -> None:
        self._model = model
        self._hardware = hardware
        self._budget = budget
        self._request = request
        self._space = space
        self._device_is_host = hardware.device == "cpu"
        self._kinds = Kinds(model)
        # What became of a candidate (held, so that its id stays its own): orders have their beginnings in common.
        self._grown: dict[tuple[int, str, str], tuple[Candidate, Candidate]] = {}

    # What fits #

    def deepest(self, update: str) -> Candidate:
        """The deepest pipeline that fits with everything as far from the device as may be. Raises PlanInfeasible."""
        smallest = self.smallest(update)
        rests, far = [where.states for where in smallest.placement.units], self._space.states[0]
        in_memory, on_device = (rests.count(tier) if far != tier else 0 for tier in ("host", "device"))
        for placement in self._pipelines(update):
            found = self.candidate(placement)
            if (in_memory or on_device) and self._request.fixed is None:
                found = self._off_the_drives(found, in_memory, on_device)
            if self.fits(found):
                return found
        return smallest

    def smallest(self, update: str) -> Candidate:
        """The shallowest pipeline, with inputs of units far away, or without slots that they come back to. Raises
        PlanInfeasible."""
        tried = []
        for tier in self._space.inputs:
            lowest = self.candidate(replace(self._lowest(update, 1, *_SUBGROUPS[-1], tier), grad_slots=1))
            tried.append(self._out_of_memory(lowest))
            if self.fits(tried[-1]):
                return tried[-1]
            mixed = self._fewest_off_the_drives(tried[-1])
            if mixed is not None:
                return mixed
        raise PlanInfeasible(self._shortage(tried[0]), tried[0].peaks)

    def _fewest_off_the_drives(self, candidate: Candidate) -> Candidate | None:
        """With as many units in host memory, and then on the device, as the drives have no room for; None where that
        does not fit either."""
        if candidate.peaks.disk <= self._budget.disk_bytes or self._request.fixed is not None:
            return None
        units = len(candidate.placement.units)
        may_live = "device" in self._space.states and not self._device_is_host
        for on_device in range(units if may_live else 1):
            found = self._off_the_drives(candidate, units - on_device, on_device)
            if found.peaks.device > self._budget.device_bytes or found.peaks.disk > self._budget.disk_bytes:
                break
            low, high = 0, units - on_device
            while high - low > 1:
                middle = (low + high) // 2
                trial = self._off_the_drives(candidate, middle, on_device)
                low, high, found = (
                    (low, middle, trial) if trial.peaks.disk <= self._budget.disk_bytes else (middle, high, found)
                )
            if self.fits(found):
                return found
        return None

    def _out_of_memory(self, candidate: Candidate) -> Candidate:
        """Where everything begins in host memory and that has no room for it: as many units on the device as it has
        not, or as the device has."""
        may_live = "device" in self._space.states and not self._device_is_host and self._request.fixed is None
        if self._space.states[0] != "host" or not may_live or candidate.peaks.host <= self._budget.host_bytes:
            return candidate
        low, found, high = 0, candidate, len(candidate.placement.units)
        while high - low > 1 and found.peaks.host > self._budget.host_bytes:
            middle = (low + high + 1) // 2
            trial = self._off_the_drives(candidate, 0, middle)
            if trial.peaks.device > self._budget.device_bytes:
                high = middle
            else:
                low, found = middle, trial
        return found

    def _off_the_drives(self, candidate: Candidate, in_memory: int, on_device: int) -> Candidate:
        """With the last so many units that are trained wholly on the device, and the first so many in host memory."""
        units = list(candidate.placement.units)
        trained = [index for index, where in enumerate(units) if where.states == self._space.states[0]]
        there = set(trained[len(trained) - on_device :])
        for index in there:
            units[index] = replace(units[index], weights="device", states="device", grads="device")
        if "host" in self._space.states:
            for index in [index for index in trained if index not in there][:in_memory]:
                where = units[index]
                weights = "host" if where.weights == "disk" and "host" in self._space.weights else where.weights
                units[index] = replace(where, weights=weights, states="host", grads="host")
        return self.candidate(_with(candidate.placement, "units", units))

    def _pipelines(self, update: str) -> Iterator[Placement]:
        """Ever smaller ones. The window takes device memory and subgroups take host memory: where these are one, slots
        are worth more than large subgroups; elsewhere each is as large as its own tier has room for."""
        windows, far = range(self._space.policy.window, 0, -1), self._space.inputs[0]
        sizes = list(self._subgroups())
        pairs = product(windows, sizes) if self._device_is_host else ((w, size) for size in sizes for w in windows)
        for window, (subgroup, slabs) in pairs:
            yield self._lowest(update, window, subgroup, slabs, far)

    def candidate(
        self, placement: Placement, deferred: Collection[int] = (), visiting: Collection[int] = ()
    ) -> Candidate:
        """The placement with the updates of these units left to the next forward, or made on the device."""
        if self._request.fixed is None:
            placement = replace(placement, units=tuple(self._settled(placement, deferred, visiting)))
        placed = self._kinds.placed(placement)
        pools = SlabNames(self._model, placement, placed).all()
        stored = self._request.has_store
        extents = extents_of_units(placement) if stored else (0,) * len(placement.units)
        process = self._budget.process_bytes
        tiers = peaks(self._model, placement, pools, process, self._device_is_host, extents, placed)
        return Candidate(placement, pools, tiers)

    def fits(self, candidate: Candidate) -> bool:
        """Whether it stays within the budget."""
        need, have = candidate.peaks, self._budget
        within = need.device <= have.device_bytes and need.host <= have.host_bytes
        return within and need.disk <= have.disk_bytes

    def _subgroups(self) -> Iterator[tuple[int, int]]:
        most = self._space.policy.state_slabs
        for size, slabs in _LARGE_SUBGROUPS:
            if size * slabs * self._model.update_bytes <= _LARGE_SHARE * self._budget.host_bytes:
                yield size, min(slabs, most)
        for size, slabs in _SUBGROUPS:
            yield size, min(slabs, most)

    def _lowest(self, update: str, window: int, subgroup: int, slabs: int, inputs: str) -> Placement:
        request, space = self._request, self._space
        acts = (Kept(inputs),) * len(self._model.calls)
        if space.policy.must_keep:
            acts = tuple(
                Kept(space.kept_in[0], everything=True) if call.kind == "FORWARD" else kept
                for call, kept in zip(self._model.calls, acts, strict=True)
            )
        units = request.fixed.units if request.fixed is not None else tuple(self._lowest_units(update))
        turns = space.policy.in_turn
        clip, times = request.clip, request.accumulation
        keep = request.keep if request.fixed is None else request.fixed.keep
        return Placement(units, acts, update, clip, times, window, slabs, subgroup, turns, keep=keep)

    def _lowest_units(self, update: str) -> Iterator[UnitPlacement]:
        space, request = self._space, self._request
        states = space.states[0]
        weights = "device" if states == "device" else space.weights[0]
        waits = (update not in ("overlap", "overlap-naive") or request.clip) and request.accumulation == 1
        grads = "device" if states == "device" else space.grads[0] if waits else "host"
        for index, unit in enumerate(self._model.units):
            resident = index == self._model.resident_unit
            rests = states if unit.num_trainable else "none"
            yield UnitPlacement("device" if resident else weights, rests, grads)

    def _settled(
        self, placement: Placement, deferred: Collection[int], visiting: Collection[int]
    ) -> Iterator[UnitPlacement]:
        every = self._space.policy.visits
        known: dict[tuple[UnitPlacement, bool, bool], UnitPlacement] = {}
        for unit, where in enumerate(placement.units):
            key = (where, unit in deferred, every or unit in visiting)
            found = known.get(key)
            if found is None:
                trained = where.states != "none"
                defers = trained and (key[1] or self._must_defer(placement, where))
                visits = trained and where.states != "device" and key[2]
                found = known[key] = replace(where, defers=defers, visits=visits)
            yield found

    def _must_defer(self, placement: Placement, where: UnitPlacement) -> bool:
        """Whether a unit leaves its update to the next forward: as all do, or because a guess could not be taken back:
        nothing on disk holds what it changes, or the gradient is not at hand."""
        sure = where.states != "disk" or where.weights == "device" or where.grads != "host" or not placement.keep.last
        return placement.update == "deferred" or (placement.speculates and sure)

    # Ways to fill memory #

    def fillings(self, lowest: Candidate, widely: bool = False) -> Iterator[Candidate]:
        """With weights and states first, or with activations that need not be computed again: on the device, or across
        the link in host memory and on disk. `widely`: from a shallow pipeline as thoroughly as from the deepest."""
        space = self._space
        keeps, may_move = space.keeps, self._request.fixed is None
        if space.policy.must_keep:
            yield self.fill(lowest)
            return
        if self._request.activations in ("host", "disk"):
            yield self.fill(self._keep(lowest, space.kept_in[0], EVERYTHING))
            return
        starts = [self.fill(lowest, order) for order in _ORDERS]
        if may_move:
            shallow = self.candidate(replace(lowest.placement, window=1, grad_slots=1))
            starts += [self.fill(shallow, order) for order in (_ORDERS if widely else _ORDERS[:1])]
        plain = list({start.placement: start for start in starts}.values())
        if "device" in space.kept_in:
            for level in keeps:
                starts += [self._keep(start, "device", level) for start in plain]
                first = self._keep(lowest, "device", level)
                if may_move and first.placement != lowest.placement:
                    starts.append(self.fill(first))
        starts = list({start.placement: start for start in starts}.values())
        yield from starts
        held_up = (is_held_up_by_recomputing(self._model, start.placement, self._hardware) for start in starts)
        if not keeps or not self._swap_tiers() or not (self._request.activations == "tape" or any(held_up)):
            return
        starts.sort(key=lambda start: lower_bound(self._model, start.placement, self._hardware))
        for start in starts[:_SWAPPED_FROM]:
            yield self._swap(start, start)
        for base in (lowest, self.candidate(replace(lowest.placement, window=1, grad_slots=1))):
            far = self.fill(base, _OFF_THE_DEVICE)
            swapped = self._swap(far, far)
            yield swapped
            yield self.fill(swapped)
        if may_move:
            yield self.fill(self._swap(lowest, starts[0]))
            for level in keeps if "device" in space.kept_in else ():
                yield self.fill(self._swap(self._keep(lowest, "device", level), starts[0]))

    def neighbours(self, placement: Placement) -> Iterator[Candidate]:
        """All that fit and differ in where one unit rests, or in what is kept of one call."""
        space = self._space
        for unit, where in enumerate(placement.units):
            if where.states == "none" or unit == self._model.resident_unit:
                continue
            for weights, states in product(space.weights, space.states):
                if states != "device" or weights == "device":
                    grads = "device" if states == "device" else "host"
                    moved = replace(where, weights=weights, states=states, grads=grads)
                    yield from self._if_it_fits(_with(placement, "units", _put(placement.units, unit, moved)))
        for call, kept in enumerate(placement.acts):
            for other in self._ways_to_keep(call):
                if other != kept:
                    yield from self._if_it_fits(_with(placement, "acts", _put(placement.acts, call, other)))

    def _ways_to_keep(self, number: int) -> Iterator[Kept]:
        space = self._space
        yield from map(Kept, space.inputs)
        for tier, level in product(space.kept_in, space.keeps):
            kept = self._kept(number, tier, level)
            if kept is not None:
                yield kept

    def _if_it_fits(self, placement: Placement) -> Iterator[Candidate]:
        found = self.candidate(placement)
        if self.fits(found):
            yield found

    def fill(self, candidate: Candidate, order: tuple[tuple[str, str], ...] = _ORDERS[0]) -> Candidate:
        """Move parts nearer, one kind after another, as many of each as fit."""
        units = range(len(candidate.placement.units))
        calls = list(reversed(range(len(candidate.placement.acts))))  # the last come back first
        for part, tier in order:
            if tier == "device" and self._device_is_host != (part == "units"):
                continue
            if part != "inputs" and self._request.fixed is not None:
                continue
            known = self._grown.get((id(candidate), part, tier))
            if known is not None:
                _, candidate = known
                continue
            if part == "inputs":
                filled = self._grow(candidate, "acts", calls, self._nearer_input(tier))
            elif part in ("units", "all"):
                filled = self._grow(candidate, "units", units, self._onto_the_device(part == "all"))
            else:
                filled = self._grow(candidate, "units", units, self._nearer(part, tier))
                filled = filled if part != "states" or self._worth_it(filled) else candidate
            self._grown[id(candidate), part, tier] = candidate, filled
            candidate = filled
        return candidate

    def _nearer(self, part: str, tier: str) -> Change:
        allowed = {"weights": self._space.weights, "states": self._space.states, "grads": self._space.grads}[part]

        def change(placement: Placement, unit: int) -> UnitPlacement | None:
            where = placement.units[unit]
            at = getattr(where, part)
            if tier not in allowed or tier not in _NEARER.get(at, ()):
                return None
            if part == "states" and tier == "device":
                return UnitPlacement("device", "device", "device") if where.weights == "device" else None
            if part == "states":
                return replace(where, states=tier)
            return replace(where, weights=tier) if part == "weights" else replace(where, grads=tier)

        return change

    def _onto_the_device(self, from_anywhere: bool) -> Change:
        """Weights and states of a unit together; or only of one that is in host memory."""
        may_live = "device" in self._space.weights and "device" in self._space.states

        def change(placement: Placement, unit: int) -> UnitPlacement | None:
            where = placement.units[unit]
            near = where.weights != "disk" and where.states == "host"
            if not may_live or where.states in ("none", "device") or not (near or from_anywhere):
                return None
            return UnitPlacement("device", "device", "device")

        return change

    def _nearer_input(self, tier: str) -> Change:
        def change(placement: Placement, call: int) -> Kept | None:
            kept = placement.acts[call]
            allowed = self._space.kept_in if kept.tape or kept.everything else self._space.inputs
            return replace(kept, tier=tier) if tier in allowed and tier in _NEARER[kept.tier] else None

        return change

    def _keep(self, candidate: Candidate, tier: str, level: str) -> Candidate:
        """Keep outputs of operators, or all that autograd saves, of as many calls as fit; the last calls first, whose
        backward comes first."""

        def change(placement: Placement, index: int) -> Kept | None:
            return self._kept(index, tier, level)

        return self._grow(candidate, "acts", list(reversed(range(len(self._model.calls)))), change)

    def _kept(self, index: int, tier: str, level: str) -> Kept | None:
        """Of one call; None where there is nothing to keep."""
        call = self._model.calls[index]
        if not call.differentiated:
            return None
        if call.kind == "LOSS" and (tier, level) != ("device", EVERYTHING):
            return None  # its backward follows at once: nothing of it is worth the way
        if level == EVERYTHING:
            return Kept(tier, everything=True)
        tape = tuple(operator.name for operator in call.tapeable)
        return Kept(tier, tape) if tape else None

    def _swap(self, candidate: Candidate, judged: Candidate) -> Candidate:
        """Move activations off the device instead of computing them again, as many as make the step of `judged`
        faster (LoHan's algorithm 1); those that find no room in host memory to the drive, where that may be."""
        space = self._space
        room = self._budget.host_bytes - candidate.peaks.host if "host" in self._swap_tiers() else 0
        chosen = best_amount(self._model, judged.placement, self._hardware, space.keeps, room, space.policy.sees_disk)
        return self.moved(candidate, chosen)

    def moved(self, candidate: Candidate, chosen: list[Output]) -> Candidate:
        """With these outputs moved off the device, as many as fit."""
        left = list(dict.fromkeys(output.call for output in chosen))
        for tier in self._swap_tiers():
            wanted = with_outputs(candidate.placement.acts, chosen, tier)
            candidate = self._grow(candidate, "acts", left, partial(_wanted, wanted))
            left = [call for call in left if candidate.placement.acts[call] != wanted[call]]
        return candidate

    def _swap_tiers(self) -> list[str]:
        """Where activations may be moved off the device, host memory first."""
        return [tier for tier in ("host", "disk") if tier in self._space.kept_in and self._is_elsewhere(tier)]

    def _is_elsewhere(self, tier: str) -> bool:
        return tier == "disk" or not self._device_is_host

    def _worth_it(self, candidate: Candidate) -> bool:
        """States in memory save traffic and wear, but steps between saved points can be lost. Unless the user
        said so, that is not done for a small share of them."""
        if self._request.states != "auto" or not self._request.has_store or "disk" not in self._space.states:
            return True
        sizes = [
            (unit.state_bytes, where.states != "disk")
            for unit, where in zip(self._model.units, candidate.placement.units, strict=True)
        ]
        on_host = sum(size for size, host in sizes if host)
        return on_host >= _WORTHWHILE_SHARE * sum(size for size, _ in sizes)

    def _grow(self, candidate: Candidate, part: str, numbers: Iterable[int], change: Change) -> Candidate:
        """Change as many of these as fit, the first ones first; where one does not, a smaller one may."""
        same: dict[object, object] = {}  # alike ones are one object: that tells them apart from others at no cost
        changes = ((number, change(candidate.placement, number)) for number in numbers)
        items = [(number, same.setdefault(new, new)) for number, new in changes if new is not None]
        while items:
            count, candidate = self._most(candidate, part, items)
            items = [item for item in items[count + 1 :] if self._size(item) < self._size(items[count])]
        return candidate

    def _size(self, item: tuple[int, object]) -> int:
        number, new = item
        if isinstance(new, Kept):
            return stored_bytes(self._model.calls[number], new)
        return self._model.units[number].weight_bytes

    def _most(self, candidate: Candidate, part: str, items: list[tuple[int, object]]) -> tuple[int, Candidate]:
        """How many of the first changes fit, and the placement with them. What they take is about proportional to
        their number, so that is where the next trial is."""
        placement = candidate.placement

        def changed(count: int) -> Candidate:
            values = list(getattr(placement, part))
            for number, new in items[:count]:
                values[number] = new
            return self.candidate(_with(placement, part, values))

        low, best, high = 0, candidate, len(items)
        over = changed(high)
        if self.fits(over):
            return high, over
        while high - low > 1:
            guess = low + int((high - low) * self._share_that_fits(best.peaks, over.peaks))
            guess = min(max(guess, low + 1), high - 1)
            trial = changed(guess)
            if self.fits(trial):
                low, best = guess, trial
            else:
                high, over = guess, trial
        return low, best

    def _share_that_fits(self, low: TierPeaks, high: TierPeaks) -> float:
        have = self._budget
        pairs = (
            (low.device, high.device, have.device_bytes),
            (low.host, high.host, have.host_bytes),
            (low.disk, high.disk, have.disk_bytes),
        )
        return min((most - start) / (end - start) for start, end, most in pairs if end > most)

    def _shortage(self, smallest: Candidate) -> str:
        need, have = smallest.peaks, self._budget
        tiers = (
            ("device", need.device, have.device_bytes, "--device-memory"),
            ("host", need.host, have.host_bytes, "--host-memory"),
            ("disk", need.disk, have.disk_bytes, "--disk-memory or more room under --store"),
        )
        short = [
            f"{tier} memory: the smallest budget that works is {format_size_up(need_bytes)}, "
            f"there is {format_size(have_bytes)} ({flag})"
            for tier, need_bytes, have_bytes, flag in tiers
            if need_bytes > have_bytes
        ]
        return "the model does not fit: " + "; ".join(short) + "; shorter or smaller batches need less"


def _put(values: tuple[Any, ...], number: int, value: object) -> list[Any]:
    return [*values[:number], value, *values[number + 1 :]]


def _wanted(wanted: tuple[Kept, ...], _: Placement, call: int) -> Kept:
    return wanted[call]


def _with(placement: Placement, part: str, values: list[Any]) -> Placement:
    """With other units or acts."""
    return replace(placement, units=tuple(values)) if part == "units" else replace(placement, acts=tuple(values))
