"""What memory that a plan leaves unused is good for: more slots, more slabs, units on the device, micro-batches side by
side."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from spillway.plan.bounds import readable_ahead
from spillway.plan.candidates import Candidate, Candidates
from spillway.spec.plan import ON_THE_DEVICE, Placement

# Of the units whose updates visit the device: so many of them. The link that they take is not only theirs.
_VISITING_SHARES = (0.9, 1.0, 0.8)  # the likeliest first


class Spare:
    """Gives it to plans of one model, machine, budget and space of choices."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._model = candidates.model
        self._hardware = candidates.hardware
        self._budget = candidates.budget
        self._request = candidates.request
        self._space = candidates.space

    def with_more_slabs(self, candidate: Candidate) -> Candidate:
        """Half of the host memory that nothing else could use takes more states on their way: what late updates write
        may then last into backward, when the drives have less to do. The same candidate where there is none."""
        placement, left = candidate.placement, self._budget.host_bytes - candidate.peaks.host
        slab = next((pool.slab_bytes for pool in candidate.pools if pool.name == "state"), 0)
        slabs = min(placement.state_slabs + (left // 2 // slab if slab else 0), self._space.policy.state_slabs)
        if slabs <= placement.state_slabs:
            return candidate
        found = self._candidates.updated_alike(replace(placement, state_slabs=slabs))
        return found if self._candidates.fits(found) else candidate

    def with_living_units(self, candidate: Candidate) -> Iterator[Candidate]:
        """Where updates visit the device: with as many units as there is room for, beside the slots of visitors, living
        there, and several shares of the others visiting; then with visitors half as large, which leave more room.
        Nothing where there is no such unit."""
        placement, space = candidate.placement, self._space
        movable = [unit for unit, where in enumerate(placement.units) if where.states == "host"]
        if "device" not in space.weights or "device" not in space.states or not placement.visits:
            return
        for subgroup in (placement.subgroup, placement.subgroup // 2):
            yield from self._living(replace(placement, subgroup=subgroup), movable)

    def _living(self, placement: Placement, movable: list[int]) -> Iterator[Candidate]:
        visiting = sum(placement.units[unit].visits for unit in movable)

        def living(count: int, share: float) -> Candidate:
            units = list(placement.units)
            for unit in movable[:count]:
                units[unit] = ON_THE_DEVICE
            late = [unit for unit, where in enumerate(placement.units) if where.defers]
            rest = spread(movable[count:], share * visiting / len(movable))
            return self._candidates.of(replace(placement, units=tuple(units)), late, rest)

        none, fits = living(0, 1.0), self._candidates.fits
        count = self._candidates.most(lambda count: living(count, 1.0), none, len(movable))[0] if fits(none) else 0
        for share in _VISITING_SHARES:
            found = living(count, share)
            if fits(found):
                yield found

    def with_wider_window(self, candidate: Candidate) -> Candidate:
        """As many more slots as there is room for that nothing else could use: what they hold at the turn to backward
        is not fetched again. The same candidate where there is none."""
        placement = candidate.placement
        fetched = sum(where.weights != "device" for where in placement.units)
        low, high = placement.window, min(fetched, self._space.policy.window) + 1
        while self._model.calls and high - low > 1:
            middle = (low + high) // 2
            found = self._candidates.updated_alike(replace(placement, window=middle))
            if self._candidates.fits(found):
                low, candidate = middle, found
            else:
                high = middle
        return candidate

    def with_read_ahead(self, candidate: Candidate, share: float) -> Candidate:
        """With slabs of states filled in backward, for updates in the next forward: so large a share of those that the
        drives have time for, and one less than there are, which is left to make them in another order. The same
        candidate where there is no list whose updates are all made there."""
        placement = candidate.placement
        state = next((pool for pool in candidate.pools if pool.name == "state"), None)
        if state is None:
            return candidate
        room = readable_ahead(self._model, placement, self._hardware)
        ahead = min(ceil(share * room / state.slab_bytes), state.count - 1)
        leaves_all = placement.update == "deferred" or (placement.update == "overlap" and placement.clip)
        if not leaves_all or placement.accumulation > 1 or placement.in_turn or not ahead:
            return candidate
        if any(where.grads == "disk" for where in placement.units):  # which are read with the states
            return candidate
        return self._candidates.updated_alike(replace(placement, ahead=ahead))

    def with_streams(self, candidate: Candidate) -> Candidate:
        """With as many micro-batches side by side as the device's memory that is left has room for. A CPU computes each
        on all its cores."""
        placement = candidate.placement
        most = max((call.chunks for call in self._model.calls if call.forks), default=1)
        # Compiled blocks may keep memory from call to call.
        if self._candidates.device_is_host or not self._request.tapes:
            return candidate
        for streams in range(min(most, self._space.policy.streams), 1, -1):
            found = self._candidates.updated_alike(replace(placement, streams=streams))
            if self._candidates.fits(found):
                return found
        return candidate


def spread(units: list[int], share: float) -> frozenset[int]:
    """So large a share of the units, evenly."""
    return frozenset(unit for turn, unit in enumerate(units) if int((turn + 1) * share) > int(turn * share))
