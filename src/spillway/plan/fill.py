"""Placements within a budget: the deepest pipeline that fits with everything far away, then memory filled with what
saves most."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spillway.plan.memory import peaks
from spillway.plan.pools import Kinds, SlabNames
from spillway.plan.request import PlanRequest, Space
from spillway.plan.swap import EVERYTHING, best_amount, with_outputs
from spillway.spec.errors import PlanInfeasible
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import KeepPoints, Kept, Placement, Pool, TierPeaks, UnitPlacement
from spillway.spec.sizes import format_size, format_size_up

# Elements per subgroup and how many are under way: large enough for the drive, small enough that slabs stay cheap. The
# first ones are for budgets of which they are a small share.
_LARGE_SUBGROUPS = ((1 << 26, 4), (1 << 25, 4))
_LARGE_SHARE = 1 / 32
_SUBGROUPS = ((1 << 24, 4), (1 << 23, 4), (1 << 22, 4), (1 << 22, 2), (1 << 20, 2), (1 << 18, 1))
# Of the optimizer states: fewer than that in host memory are not worth losing a saved point at every step.
_WORTHWHILE_SHARE = 0.25
_NEARER = {"disk": ("host", "device"), "host": ("device",), "device": ()}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement, its pools and what it takes of each tier."""

    placement: Placement
    pools: tuple[Pool, ...]
    peaks: TierPeaks


# Changes the unit (or call) of a number for the better; None where there is nothing to change.
Change = Callable[[Placement, int], "UnitPlacement | Kept | None"]


def extents_of_units(placement: Placement, keep: KeepPoints) -> tuple[int, ...]:
    """Copies of each unit on disk. Those of the saved points that are kept and the one being written, where each step
    is a saved point. Where states also rest in host memory, saved points lie further apart and the step goes on writing
    beside the one that the next saved point will name: one more. A unit that is not trained never changes."""
    anything_on_disk = any("disk" in (where.weights, where.states) for where in placement.units)
    all_on_disk = all(where.states in ("disk", "none") for where in placement.units)
    if all_on_disk:
        trained = keep.last + 1
    elif anything_on_disk:
        trained = keep.last + 2
    else:
        trained = keep.last + 1 if keep.of_memory else 0
    frozen = 1 if anything_on_disk or keep.of_memory else 0
    return tuple(frozen if where.states == "none" else trained for where in placement.units)


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

    # What fits #

    def deepest(self, update: str) -> Candidate:
        """The deepest pipeline that fits with everything as far from the device as may be. Raises PlanInfeasible."""
        smallest = None
        for window, grad_slots in (*((window, 2) for window in range(self._space.policy.window, 0, -1)), (1, 1)):
            for subgroup, slabs in self._subgroups():
                lowest = replace(self._lowest(update, window, subgroup, slabs), grad_slots=grad_slots)
                smallest = self.candidate(lowest)
                if self.fits(smallest):
                    return smallest
        if smallest is None:
            raise AssertionError("there is no pipeline depth to try")
        raise PlanInfeasible(self._shortage(smallest), smallest.peaks)

    def candidate(
        self, placement: Placement, deferred: Collection[int] = (), visiting: Collection[int] = ()
    ) -> Candidate:
        """The placement with the updates of these units left to the next forward, or made on the device."""
        if self._request.fixed is None:
            placement = replace(placement, units=tuple(self._settled(placement, deferred, visiting)))
        placed = self._kinds.placed(placement)
        pools = SlabNames(self._model, placement, placed).all()
        stored = self._request.has_store
        extents = extents_of_units(placement, self._request.keep) if stored else (0,) * len(placement.units)
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

    def _lowest(self, update: str, window: int, subgroup: int, slabs: int) -> Placement:
        request, space = self._request, self._space
        acts = (Kept(space.inputs[0]),) * len(self._model.calls)
        if space.policy.must_keep:
            acts = tuple(
                Kept(space.kept_in[0], everything=True) if call.kind == "FORWARD" else kept
                for call, kept in zip(self._model.calls, acts, strict=True)
            )
        units = request.fixed.units if request.fixed is not None else tuple(self._lowest_units(update))
        return Placement(units, acts, update, request.clip, request.accumulation, window, slabs, subgroup)

    def _lowest_units(self, update: str) -> Iterator[UnitPlacement]:
        space, request = self._space, self._request
        states = space.states[0]
        weights = "device" if states == "device" else space.weights[0]
        waits = (update != "overlap" or request.clip) and request.accumulation == 1
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
        sure = where.states != "disk" or where.weights == "device" or where.grads != "host"
        return placement.update == "deferred" or (placement.speculates and sure)

    # Ways to fill memory #

    def fillings(self, lowest: Candidate) -> Iterator[Candidate]:
        """With weights and states first, or with activations that need not be computed again: on the device, or across
        the link in host memory and on disk."""
        space = self._space
        keeps, may_move = space.keeps, self._request.fixed is None
        if space.policy.must_keep:
            yield self.fill(lowest)
            return
        if self._request.activations in ("host", "disk"):
            yield self.fill(self._keep_where_it_fits(lowest, space.kept_in[0]))
            return
        filled = self.fill(lowest)
        yield filled
        starts = [filled]
        if "device" in space.kept_in:
            for level in keeps:
                kept = self._keep_on_device(filled, level)
                if kept.placement != filled.placement:
                    yield kept
                    starts.append(kept)
                first = self._keep_on_device(lowest, level)
                if may_move and first.placement != lowest.placement and not self._keeps_every_call(kept):
                    starts.append(self.fill(first))
                    yield starts[-1]
        if not keeps or not self._swap_tiers():
            return
        for start in starts:
            yield self._swap(start, start)
        if may_move:
            yield self.fill(self._swap(lowest, filled))
            for level in keeps if "device" in space.kept_in else ():
                yield self.fill(self._swap(self._keep_on_device(lowest, level), filled))

    def fill(self, candidate: Candidate) -> Candidate:
        """Move what saves most traffic per byte nearer while it fits: inputs of units (written and read once a step;
        the last calls first, for they come back first), gradients that wait for the norm, weights (read twice), then
        states."""
        space, units = self._space, range(len(candidate.placement.units))
        calls = list(reversed(range(len(candidate.placement.acts))))
        candidate = self._grow(candidate, "acts", calls, self._nearer_input("host"))
        if self._request.fixed is None:
            candidate = self._grow(candidate, "units", units, self._nearer("grads", space.grads, "host"))
            candidate = self._grow(candidate, "units", units, self._nearer("weights", space.weights, "host"))
            filled = self._grow(candidate, "units", units, self._nearer("states", space.states, "host"))
            candidate = filled if self._worth_it(filled) else candidate
            if not self._device_is_host:
                candidate = self._grow(candidate, "units", units, self._nearer("weights", space.weights, "device"))
                candidate = self._grow(candidate, "units", units, self._nearer("states", space.states, "device"))
        if not self._device_is_host:
            candidate = self._grow(candidate, "acts", calls, self._nearer_input("device"))
        return candidate

    def _nearer(self, part: str, allowed: tuple[str, ...], tier: str) -> Change:
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

    def _nearer_input(self, tier: str) -> Change:
        def change(placement: Placement, call: int) -> Kept | None:
            kept = placement.acts[call]
            allowed = self._space.kept_in if kept.tape or kept.everything else self._space.inputs
            return replace(kept, tier=tier) if tier in allowed and tier in _NEARER[kept.tier] else None

        return change

    def _keep_on_device(self, candidate: Candidate, level: str) -> Candidate:
        """Keep outputs of operators, or all that autograd saves, of as many calls as fit; the last calls first, whose
        backward comes first."""

        def change(placement: Placement, index: int) -> Kept | None:
            call = self._model.calls[index]
            tape = tuple(operator.name for operator in call.tapeable)
            if call.kind != "FORWARD" or (level == "tape" and not tape):
                return None
            return Kept("device", everything=True) if level == EVERYTHING else Kept("device", tape)

        return self._grow(candidate, "acts", list(reversed(range(len(self._model.calls)))), change)

    def _keep_where_it_fits(self, candidate: Candidate, tier: str) -> Candidate:
        def change(placement: Placement, call: int) -> Kept | None:
            return Kept(tier, everything=True) if self._model.calls[call].kind == "FORWARD" else None

        return self._grow(candidate, "acts", list(reversed(range(len(self._model.calls)))), change)

    def _keeps_every_call(self, candidate: Candidate) -> bool:
        pairs = zip(self._model.calls, candidate.placement.acts, strict=True)
        return all(kept.everything or kept.tape for call, kept in pairs if call.kind == "FORWARD")

    def _swap(self, candidate: Candidate, judged: Candidate) -> Candidate:
        """Move activations off the device instead of computing them again, as many as make the step of `judged`
        faster (LoHan's algorithm 1); those that find no room in host memory to the drive, where that may be."""
        space = self._space
        tiers = self._swap_tiers()
        room = self._budget.host_bytes - candidate.peaks.host if "host" in tiers else 0
        chosen = best_amount(self._model, judged.placement, self._hardware, space.keeps, room, space.policy.sees_disk)
        left = list(dict.fromkeys(output.call for output in chosen))
        for tier in tiers:
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
        """Change as many of these as fit, the first ones first; where one does not, those of another size may."""
        same: dict[object, object] = {}  # alike ones are one object: that tells them apart from others at no cost
        changes = ((number, change(candidate.placement, number)) for number in numbers)
        items = [(number, same.setdefault(new, new)) for number, new in changes if new is not None]
        kinds = self._kinds.calls if part == "acts" else self._kinds.units
        while items:
            count, candidate = self._most(candidate, part, items)
            items = [item for item in items[count + 1 :] if kinds[item[0]] != kinds[items[count][0]]]
        return candidate

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


def _wanted(wanted: tuple[Kept, ...], _: Placement, call: int) -> Kept:
    return wanted[call]


def _with(placement: Placement, part: str, values: list[Any]) -> Placement:
    """With other units or acts."""
    return replace(placement, units=tuple(values)) if part == "units" else replace(placement, acts=tuple(values))
