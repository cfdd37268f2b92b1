"""Placements, what they take of each tier, and how many changes of one kind a budget has room for."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spillway.plan.memory import extents_of_units, peaks
from spillway.plan.pools import Kinds, SlabNames, stored_bytes
from spillway.plan.request import PlanRequest, Space
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Kept, Placement, Pool, TierPeaks, UnitPlacement


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement, its pools and what it takes of each tier."""

    placement: Placement
    pools: tuple[Pool, ...]
    peaks: TierPeaks


# Changes the unit (or call) of a number for the better; None where there is nothing to change.
Change = Callable[[Placement, int], "UnitPlacement | Kept | None"]


class Candidates:
    """Makes and changes candidates for one model, machine, budget and space of choices."""

    def __init__(
        self, model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest, space: Space
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.budget = budget
        self.request = request
        self.space = space
        self.device_is_host = hardware.device == "cpu"
        self.kinds = Kinds(model)

    def of(self, placement: Placement, deferred: Collection[int] = (), visiting: Collection[int] = ()) -> Candidate:
        """The placement with the updates of these units left to the next forward, or made on the device."""
        if self.request.fixed is None:
            placement = replace(placement, units=self._settled(placement, deferred, visiting))
        names = SlabNames(self.model, placement, self.kinds)
        pools = names.all()
        stored = self.request.has_store
        extents = extents_of_units(placement) if stored else (0,) * len(placement.units)
        process = self.budget.process_bytes
        tiers = peaks(self.model, placement, pools, process, self.device_is_host, extents, names.placed)
        return Candidate(placement, pools, tiers)

    def updated_alike(self, placement: Placement) -> Candidate:
        """The placement with every update when and where its units already say."""
        units = list(enumerate(placement.units))
        late, visiting = (
            [unit for unit, where in units if where.defers],
            [unit for unit, where in units if where.visits],
        )
        return self.of(placement, late, visiting)

    def fits(self, candidate: Candidate) -> bool:
        """Whether it stays within the budget."""
        need, have = candidate.peaks, self.budget
        within = need.device <= have.device_bytes and need.host <= have.host_bytes
        return within and need.disk <= have.disk_bytes

    def _settled(
        self, placement: Placement, deferred: Collection[int], visiting: Collection[int]
    ) -> tuple[UnitPlacement, ...]:
        """Where each unit rests, and when and where it is updated. Alike ones are one object."""
        different = dict(zip(map(id, placement.units), placement.units, strict=True))
        known: dict[UnitPlacement, UnitPlacement] = {}
        every = self.space.policy.visits

        def settled(where: UnitPlacement, defers: bool, visits: bool) -> UnitPlacement:
            trained = where.states != "none"
            defers = trained and (defers or self._must_defer(placement, where))
            visits = trained and where.states != "device" and (every or visits)
            changed = where.defers != defers or where.visits != visits
            new = replace(where, defers=defers, visits=visits) if changed else where
            return known.setdefault(new, new)

        late, there = frozenset(deferred), frozenset(visiting)
        if not late and not there:  # most of them by far
            alike = {number: settled(where, False, False) for number, where in different.items()}
            return tuple(map(alike.__getitem__, map(id, placement.units)))
        choices = {
            (number, defers, visits): settled(where, defers, visits)
            for number, where in different.items()
            for defers in (False, True)
            for visits in (False, True)
        }
        return tuple(choices[id(where), unit in late, unit in there] for unit, where in enumerate(placement.units))

    def _must_defer(self, placement: Placement, where: UnitPlacement) -> bool:
        """Whether a unit leaves its update to the next forward: as all do, because its gradients are summed on disk, or
        because a guess could not be taken back: nothing on disk holds what it changes, or the gradient is not at
        hand."""
        sure = where.states != "disk" or where.weights == "device" or where.grads != "host" or not placement.keep.last
        spilled = placement.overlaps and where.grads == "disk"
        return placement.update == "deferred" or spilled or (placement.speculates and sure)

    def grow(self, candidate: Candidate, part: str, numbers: Iterable[int], change: Change) -> Candidate:
        """Change as many of these as fit, the first ones first; where one does not, a smaller one may."""
        same: dict[object, object] = {}  # alike ones are one object: that tells them apart from others at no cost
        changes = ((number, change(candidate.placement, number)) for number in numbers)
        items = [(number, same.setdefault(new, new)) for number, new in changes if new is not None]
        while items:
            count, candidate = self.most(partial(self._first_changed, candidate, part, items), candidate, len(items))
            items = [item for item in items[count + 1 :] if self._size(item) < self._size(items[count])]
        return candidate

    def _size(self, item: tuple[int, object]) -> int:
        number, new = item
        if isinstance(new, Kept):
            return stored_bytes(self.model.calls[number], new)
        return self.model.units[number].weight_bytes

    def _first_changed(self, candidate: Candidate, part: str, items: list[tuple[int, object]], count: int) -> Candidate:
        values = list(getattr(candidate.placement, part))
        for number, new in items[:count]:
            values[number] = new
        return self.of(with_part(candidate.placement, part, values))

    def most(self, with_changes: Callable[[int], Candidate], none: Candidate, high: int) -> tuple[int, Candidate]:
        """How many of up to `high` changes fit, and the placement with them; `none`: without any. What they take is
        about proportional to their number, so that is where the next trial is."""
        low, best = 0, none
        over = with_changes(high)
        if self.fits(over):
            return high, over
        while high - low > 1:
            guess = low + int((high - low) * self._share_that_fits(best.peaks, over.peaks))
            guess = min(max(guess, low + 1), high - 1)
            trial = with_changes(guess)
            if self.fits(trial):
                low, best = guess, trial
            else:
                high, over = guess, trial
        return low, best

    def _share_that_fits(self, low: TierPeaks, high: TierPeaks) -> float:
        have = self.budget
        pairs = (
            (low.device, high.device, have.device_bytes),
            (low.host, high.host, have.host_bytes),
            (low.disk, high.disk, have.disk_bytes),
        )
        return min((most - start) / (end - start) for start, end, most in pairs if end > most)


def with_part(placement: Placement, part: str, values: list[Any]) -> Placement:
    """With other units or acts."""
    return replace(placement, units=tuple(values)) if part == "units" else replace(placement, acts=tuple(values))
