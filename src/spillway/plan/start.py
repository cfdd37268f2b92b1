"""Where memory begins to be filled: the deepest pipeline that fits with everything far away."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil

from spillway.plan.candidates import Candidate, Candidates, with_part
from spillway.spec.errors import PlanInfeasible
from spillway.spec.hardware import DEVICE_RESERVE
from spillway.spec.plan import Kept, Placement, UnitPlacement
from spillway.spec.sizes import format_size, format_size_up

# Elements per subgroup and how many are under way: large enough for the drive, small enough that slabs stay cheap. The
# first ones are for budgets of which they are a small share. They are no powers of two: arrays that lie so far apart
# take each other's place in the processor's first cache, and the update becomes a third slower.
_ODD = 3 << 14
_LARGE_SUBGROUPS = tuple((size + _ODD, 4) for size in (1 << 28, 1 << 27, 1 << 26, 1 << 25))
_LARGE_SHARE = 1 / 32
_DEEPEST = 4  # slots of a window: more of them come of what memory is left, too
_SUBGROUPS = ((1 << 24, 4), (1 << 23, 4), (1 << 22, 4), (1 << 22, 2), (1 << 20, 2), (1 << 18, 1))


class Start:
    """Finds it for one model, machine, budget and space of choices."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._model = candidates.model
        self._budget = candidates.budget
        self._request = candidates.request
        self._space = candidates.space
        self._device_is_host = candidates.device_is_host

    def deepest(self, update: str) -> Candidate:
        """The deepest pipeline that fits with everything as far from the device as may be. Raises PlanInfeasible."""
        smallest = self.smallest(update)
        rests, far = [where.states for where in smallest.placement.units], self._space.states[0]
        in_memory, on_device = (rests.count(tier) if far != tier else 0 for tier in ("host", "device"))
        for placement in self._pipelines(update):
            found = self._candidates.of(placement)
            if (in_memory or on_device) and self._request.fixed is None:
                found = self._off_the_drives(found, in_memory, on_device)
            if self._candidates.fits(found):
                return found
        return self._in_larger_parts(smallest)

    def _in_larger_parts(self, candidate: Candidate) -> Candidate:
        """With the largest subgroups that fit: the smallest ones make lists of millions of operations."""
        if self._request.fixed is not None:
            return candidate
        for subgroup, slabs in self._subgroups():
            found = self._candidates.of(replace(candidate.placement, subgroup=subgroup, state_slabs=slabs))
            if subgroup > candidate.placement.subgroup and self._candidates.fits(found):
                return found
        return candidate

    def smallest(self, update: str) -> Candidate:
        """The shallowest pipeline, with inputs of units far away, or without slots that they come back to. Raises
        PlanInfeasible."""
        tried = []
        for tier in self._space.inputs:
            lowest = self._candidates.of(replace(self._lowest(update, 1, *_SUBGROUPS[-1], tier), grad_slots=1))
            tried.append(self._out_of_memory(lowest))
            if self._candidates.fits(tried[-1]):
                return tried[-1]
            mixed = self._fewest_off_the_drives(tried[-1])
            if mixed is not None:
                return mixed
        least = min(tried, key=self._excess)
        raise PlanInfeasible(self._shortage(least), least.peaks)

    def _excess(self, candidate: Candidate) -> int:
        """Bytes that are missing, of all tiers."""
        need, have = candidate.peaks, self._budget
        pairs = ((need.device, have.device_bytes), (need.host, have.host_bytes), (need.disk, have.disk_bytes))
        return sum(max(wanted - there, 0) for wanted, there in pairs)

    def _fewest_off_the_drives(self, candidate: Candidate) -> Candidate | None:
        """With as many units in host memory, and then on the device, as the drives have no room for; None where that
        does not fit either."""
        if candidate.peaks.disk <= self._budget.disk_bytes or self._request.fixed is not None:
            return None
        may_live = "device" in self._space.states and not self._device_is_host
        # The more live on the device, the fewer have to be in memory.
        low, high = -1, len(candidate.placement.units) if may_live else 0
        best = self._fewest_in_memory(candidate, high)
        while high - low > 1:
            middle = (low + high) // 2
            trial = self._fewest_in_memory(candidate, middle)
            if trial.peaks.host <= self._budget.host_bytes and trial.peaks.disk <= self._budget.disk_bytes:
                high, best = middle, trial
            else:
                low = middle
        return best if self._candidates.fits(best) else None

    def _fewest_in_memory(self, candidate: Candidate, on_device: int) -> Candidate:
        """With so many units on the device, and as few in host memory as the drives have no room for."""
        have, low, high = self._budget.disk_bytes, 0, len(candidate.placement.units) - on_device
        over, best = (self._off_the_drives(candidate, count, on_device) for count in (low, high))
        if over.peaks.disk <= have:
            return over
        halves = False  # every other time, for units are mostly, but not all alike
        while high - low > 1 and best.peaks.disk <= have:
            share = 0.5 if halves else (over.peaks.disk - have) / (over.peaks.disk - best.peaks.disk)
            guess = min(max(low + ceil((high - low) * share), low + 1), high - 1)
            trial = self._off_the_drives(candidate, guess, on_device)
            low, over, high, best = (
                (low, over, guess, trial) if trial.peaks.disk <= have else (guess, trial, high, best)
            )
            halves = not halves
        return best

    def _out_of_memory(self, candidate: Candidate) -> Candidate:
        """Where everything begins in host memory and that has no room for it: as many units on the device as it has
        not, or as the device has."""
        may_live = "device" in self._space.states and not self._device_is_host and self._request.fixed is None
        if self._space.states[0] != "host" or not may_live or candidate.peaks.host <= self._budget.host_bytes:
            return candidate
        low, found, high = 0, candidate, len(candidate.placement.units) + 1
        while high - low > 1 and found.peaks.host > self._budget.host_bytes:
            middle = (low + high) // 2
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
        far = max(len(trained) - on_device, 0)
        known: dict[int, UnitPlacement] = {}  # alike ones stay one object
        for index in trained[far:]:
            where = units[index]
            units[index] = known.get(id(where)) or known.setdefault(
                id(where), replace(where, weights="device", states="device", grads="device")
            )
        known = {}
        for index in trained[:far][:in_memory] if "host" in self._space.states else ():
            where = units[index]
            units[index] = known.get(id(where)) or known.setdefault(id(where), self._in_memory(where))
        return self._candidates.of(with_part(candidate.placement, "units", units))

    def _in_memory(self, where: UnitPlacement) -> UnitPlacement:
        weights = "host" if where.weights == "disk" and "host" in self._space.weights else where.weights
        return replace(where, weights=weights, states="host", grads="host")

    def _pipelines(self, update: str) -> Iterator[Placement]:
        """Ever smaller ones. The window takes device memory and subgroups take host memory: where these are one, slots
        are worth more than large subgroups; elsewhere each is as large as its own tier has room for."""
        windows, far = range(min(_DEEPEST, self._space.policy.window), 0, -1), self._space.inputs[0]
        sizes = list(self._subgroups())
        pairs = product(windows, sizes) if self._device_is_host else ((w, size) for size in sizes for w in windows)
        for window, (subgroup, slabs) in pairs:
            yield self._lowest(update, window, subgroup, slabs, far)

    def _subgroups(self) -> Iterator[tuple[int, int]]:
        most = self._space.policy.state_slabs  # more than these come of what memory is left (plan/spare.py)
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
        streams = request.streams or 1
        return Placement(units, acts, update, clip, times, window, slabs, subgroup, turns, keep=keep, streams=streams)

    def _lowest_units(self, update: str) -> Iterator[UnitPlacement]:
        space, request = self._space, self._request
        states = space.states[0]
        weights = "device" if states == "device" else space.weights[0]
        waits = update not in ("overlap", "overlap-naive") or request.clip or request.accumulation > 1
        grads = "device" if states == "device" else space.grads[0] if waits else "host"
        known: dict[tuple[bool, bool], UnitPlacement] = {}  # alike ones are one object
        for index, unit in enumerate(self._model.units):
            kind = resident, trained = index in self._model.resident_units, unit.num_trainable > 0
            if kind not in known:
                known[kind] = UnitPlacement("device" if resident else weights, states if trained else "none", grads)
            yield known[kind]

    def _shortage(self, smallest: Candidate) -> str:
        need, have = smallest.peaks, self._budget
        beside = 0 if self._device_is_host else DEVICE_RESERVE  # of what is given, nothing of ours may lie in it
        tiers = (
            ("device", need.device + beside, have.device_bytes + beside, "device_memory"),
            ("host", need.host, have.host_bytes, "host_memory"),
            ("disk", need.disk, have.disk_bytes, "disk_memory, or more room under the store"),
        )
        short = [
            f"{tier} memory: the smallest budget that works is {format_size_up(need_bytes)}, "
            f"there is {format_size(have_bytes)} ({flag})"
            for tier, need_bytes, have_bytes, flag in tiers
            if need_bytes > have_bytes
        ]
        return "the model does not fit: " + "; ".join(short) + "; shorter or smaller batches need less"
