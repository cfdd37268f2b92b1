"""The planner: closed forms rank the ways to fill memory, the simulator decides among the best."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from spillway.plan.bounds import busiest, least_computing, lower_bound
from spillway.plan.candidates import Candidate, Candidates
from spillway.plan.fill import Filler
from spillway.plan.interleave import with_acts_interleaved, with_units_interleaved
from spillway.plan.lower import lower_step, wary_step
from spillway.plan.policies import POLICIES
from spillway.plan.pools import recomputed_flops
from spillway.plan.request import PlanRequest, Space, space_of
from spillway.plan.simulate import step_seconds
from spillway.plan.spare import Spare
from spillway.plan.start import Start
from spillway.plan.thin import in_few_parts, thinned
from spillway.plan.variants import Variants
from spillway.spec.errors import PlanInfeasible, UsageError, required
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Placement, Plan

# Operations that are simulated before the best plan so far has to do: some seconds of them.
_PATIENCE = 300_000
# A plan this close to what none can beat is not searched further.
_CLOSE = 1.01
# Nor is one so close to it searched for units that could live on the device.
_WORTH_LIVING = 1.1
# Of models of no more units whole steps are compared, and more ways to fill memory.
_WIDELY = 24
# And those of no more units piece by piece.
_CLIMBED = 4
# Of larger ones: where updates at one moment take so much longer than the best plan, those at another do, too.
_FAR_OFF = 1.15
# Plans of larger ones are compared by steps of about that many units. Between the best ones that are so near to each
# other their whole lists decide: of two at least, and of more until those have so many operations.
_NEAR, _NEAR_VISITING = 1.06, 1.25
_FINALISTS = 2
_MOST_FINALISTS = 4
_FINAL_OPS = 8_000
# Of the states that drives have time to read in backward, for updates in the next forward.
_AHEAD_SHARES = (2.0, 1.0, 0.5)


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate, the lists of a whole step of it, its predicted seconds, and the lane that is busiest then."""

    candidate: Candidate
    plan: Plan
    seconds: float
    bottleneck: str


_seconds = attrgetter("seconds")


class Search:
    """For the fastest plan of one model, machine, budget and space of choices."""

    def __init__(
        self, model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest, space: Space
    ) -> None:
        self._model = model
        self._hardware = hardware
        self._candidates = Candidates(model, hardware, budget, request, space)
        self._filler = Filler(self._candidates)
        self._spare = Spare(self._candidates)
        self._variants = Variants(self._candidates)
        self._budget = budget
        self._request = request
        self._space = space
        self._simulated = 0
        self._estimated: list[Timed] = []
        self._seen: dict[Placement, Candidate] = {}
        # So many units that plans take long to simulate; of calls that are known, or there is no step to compare.
        self._is_large = len(model.units) > _WIDELY and least_computing(model, hardware, request.accumulation) > 0

    def run(self) -> Timed:
        """The fastest plan that was found."""
        best: Timed | None = None
        listed = 0
        for number, found in enumerate(self._finalists()):
            if best is not None and (self._is_tired or (number >= _FINALISTS and listed > _FINAL_OPS)):
                break
            fuller = self._while_patient(found, self._with_living_units, self._with_wider_window, self._with_more_slabs)
            whole = self._while_patient(self._time_whole(fuller), self._with_units_interleaved, self._in_best_mode)
            listed += len(whole.plan.ops)
            if best is None or whole.seconds < best.seconds:
                best = whole
        best = required(best, "a search without finalists")
        return self._with_streams(self._while_patient(best, self._with_acts_interleaved, self._with_read_ahead))

    @property
    def _is_tired(self) -> bool:
        return self._simulated > _PATIENCE

    def _while_patient(self, found: Timed, *better: Callable[[Timed], Timed]) -> Timed:
        """What these steps make of a plan; of one whose list is very long, without those that would take too long."""
        for step in better:
            found = found if self._is_tired else step(found)
        return found

    def _finalists(self) -> list[Timed]:
        best = self._find()
        if not self._is_large:
            return [best]
        best = self._best_with_living_units(best)
        near = sorted(
            (found for found in self._estimated if found.seconds <= _near(found) * best.seconds), key=_seconds
        )
        of_each_kind = sorted({_kind(found): found for found in reversed(near)}.values(), key=_seconds)
        return list({found.candidate.placement: found for found in (*of_each_kind, *near[:_MOST_FINALISTS])}.values())

    def _best_with_living_units(self, best: Timed) -> Timed:
        """Of all ways to fill memory whose updates may visit the device: what one of them loses by leaving the device
        room it may gain twice by the units that live there."""
        least = least_computing(self._model, self._hardware, self._request.accumulation)
        if not self._searches_freely or self._request.fixed is not None or best.seconds <= _WORTH_LIVING * least:
            return best
        visiting = (way for found in list(self._seen.values()) for way in self._variants.visiting(found))
        living = (next(self._spare.with_living_units(way), None) for way in visiting)
        ways = {way.placement: (self._bound_of(way.placement), way) for way in living if way is not None}
        for bound, way in sorted(ways.values(), key=itemgetter(0)):
            if _CLOSE * bound < best.seconds and not self._is_tired:
                best = min(best, self._time(way), key=_seconds)
        return best

    def _with_living_units(self, best: Timed) -> Timed:
        """That plan with units that live on the device, beside updates that visit it, where that makes it faster."""
        if not self._searches_freely or self._request.fixed is not None:
            return best
        ways = list(self._spare.with_living_units(best.candidate))
        return self._fastest(self._simulate(best.candidate), ways) if ways else best

    def _with_wider_window(self, best: Timed) -> Timed:
        """That plan with more slots, where that is worth the memory."""
        wider = self._spare.with_wider_window(best.candidate)
        if wider is best.candidate:
            return best
        found = self._time(wider)
        return found if _CLOSE * found.seconds < best.seconds else best

    def _with_more_slabs(self, best: Timed) -> Timed:
        """That plan with more states on their way, or with that and its updates at another moment, where it is as fast:
        besides what the simulation shows, they make up for a drive whose speed varies."""
        deeper = self._spare.with_more_slabs(best.candidate)
        if deeper is best.candidate:
            return best
        fastest = self._time(deeper)
        for found in self._in_every_mode(deeper):
            place, least = found.placement, min(fastest.seconds, best.seconds)
            if place.update != best.candidate.placement.update and self._bound_of(place) < least:
                fastest = min(fastest, self._time(found), key=_seconds)
        return fastest if fastest.seconds <= best.seconds else best

    def _in_best_mode(self, best: Timed) -> Timed:
        """That plan with its updates on the device at another moment, where that makes it faster."""
        return self._fastest(best, self._variants.in_other_modes(best.candidate))

    def _fastest(self, best: Timed, others: Iterable[Candidate]) -> Timed:
        """Of the best so far and those others whose bounds are below it."""
        for other in others:
            if self._bound_of(other.placement) < best.seconds:
                best = min(best, self._simulate(other), key=_seconds)
        return best

    def _with_units_interleaved(self, best: Timed) -> Timed:
        return self._if_faster(best, with_units_interleaved)

    def _with_acts_interleaved(self, best: Timed) -> Timed:
        return self._if_faster(best, with_acts_interleaved)

    def _if_faster(self, best: Timed, change: Callable[[Candidates, Candidate], Candidate]) -> Timed:
        """That plan with a change, where that makes it faster."""
        if self._space.policy.name != "auto" or self._request.fixed is not None:
            return best
        found = change(self._candidates, best.candidate)
        return best if found is best.candidate else min(best, self._simulate(found), key=_seconds)

    def _with_read_ahead(self, best: Timed) -> Timed:
        """That plan with states for the next forward read in backward, where that makes the step faster; with a wider
        window, too, for what the drives read in backward otherwise leaves them no time for that."""
        if not self._space.policy.reads_ahead or not self._model.calls:
            return best
        base = self._spare.with_wider_window(best.candidate)
        found = [self._spare.with_read_ahead(base, share) for share in _AHEAD_SHARES]
        ways = list({way.placement: way for way in found if way is not base}.values())
        if not ways:
            return best
        if best.plan.placement.speculates:
            return self._with_read_ahead_where_clipped(best, ways)
        fastest = min(map(self._simulate, ways), key=_seconds)
        return fastest if _CLOSE * fastest.seconds < best.seconds else best

    def _with_read_ahead_where_clipped(self, best: Timed, ways: list[Candidate]) -> Timed:
        """Of a plan that speculates, in steps that do not: the best of these ways, where other steps are as fast."""
        seconds = {way.placement: self._clipped_seconds(way) for way in ways}
        fastest = self._simulate(min(ways, key=lambda way: seconds[way.placement]))
        pays = _CLOSE * seconds[fastest.candidate.placement] < self._clipped_seconds(best.candidate)
        return fastest if pays and fastest.seconds <= best.seconds else best

    def _clipped_seconds(self, candidate: Candidate) -> float:
        plan = wary_step(self._model, self._lowered(self._model, candidate.placement))
        return step_seconds(plan, self._hardware, wary=True)[0]

    def _with_streams(self, best: Timed) -> Timed:
        """That plan with as many micro-batches side by side as the memory that is left has room for (STRONGHOLD). The
        simulation gives nothing for it: what it gains, the kernels of small micro-batches leave idle."""
        if self._request.streams is not None:
            return best
        candidate = self._spare.with_streams(best.candidate)
        plan = replace(best.plan, placement=replace(best.plan.placement, streams=candidate.placement.streams))
        return replace(best, candidate=candidate, plan=plan)

    def _find(self) -> Timed:
        floor = _CLOSE * least_computing(self._model, self._hardware, self._request.accumulation)
        best = self._best_of(self._fillings(), None, floor)
        for space in self._spaces_of_others() if best.seconds > floor else ():
            best = self._best_of(self._fillings_of(space), best, floor)
        may_climb = self._searches_freely and self._request.fixed is None
        if may_climb and len(self._model.units) <= _CLIMBED:
            starts = [best, *map(self._time, self._in_every_mode(next(iter(self._seen.values()))))]
            best = min(map(self._climb, starts), key=_seconds)
        return best

    def _best_of(self, fillings: Iterator[Candidate], best: Timed | None, floor: float) -> Timed:
        """The best so far or of these; the first that takes no longer than `floor` does."""
        bounds: dict[Placement, float] = {}
        tried: Placement | None = None
        for candidate in fillings:
            place = candidate.placement
            if place in self._seen:
                continue
            self._seen[place], bounds[place] = candidate, self._bound(candidate)
            if bounds[place] <= floor and best is None:  # nothing that comes later can be told to be better
                best, tried = self._best_variant(best, candidate, bounds[place]), place
                if best.seconds <= floor:
                    return best
        for place in sorted(bounds, key=lambda place: (bounds[place], self._recomputed(self._seen[place]))):
            if place != tried:
                best = self._best_variant(best, self._seen[place], bounds[place])
        return required(best, "nothing was left to choose from")

    def _best_variant(self, best: Timed | None, candidate: Candidate, bound: float) -> Timed:
        """The best so far or a faster way to update of this candidate, whose ways all take `bound` at least."""
        first: Timed | None = None
        for variant in self._variants.of(candidate):
            if best is not None and (best.seconds <= _CLOSE * bound or self._is_tired):
                break
            if best is not None and self._bound_of(variant.placement) >= best.seconds:
                continue
            is_far = first is not None and best is not None and first.seconds > _FAR_OFF * best.seconds
            if is_far and self._is_large and not variant.placement.visits:
                continue
            found = self._time(variant)
            first = first or found
            if best is None or found.seconds < best.seconds:
                best = found
        return required(best, "a candidate has no way to update")

    @property
    def _searches_freely(self) -> bool:
        """Not as another planner would, whose rules single changes would break; nor on the CPU: little differs."""
        return self._space.policy.name == "auto" and self._hardware.device != "cpu"

    def _in_every_mode(self, candidate: Candidate) -> Iterator[Candidate]:
        modes = self._space.policy.updates if self._space.update == "auto" else (self._space.update,)
        for mode in modes:
            found = self._candidates.of(replace(candidate.placement, update=mode))
            if self._candidates.fits(found):
                yield found

    def _climb(self, best: Timed) -> Timed:
        """To a placement that no change of one unit or one call makes faster."""
        while True:
            before = best
            for candidate in self._filler.neighbours(before.candidate.placement):
                best = self._better(best, candidate)
            if best is before:
                return best

    def _fillings(self) -> Iterator[Candidate]:
        """Of the whole space, and of those without the drives."""
        needs_drives = None
        start = Start(self._candidates).deepest(first_mode(self._space))
        for candidate in self._filler.fillings(start, self._searches_widely):
            if needs_drives is None:
                needs_drives = any("disk" in (where.weights, where.states) for where in candidate.placement.units)
            yield candidate
        if needs_drives and self._request.fixed is None:
            for space in (self._space.in_memory(), self._space.without_drives()):
                yield from self._fillings_of(space)
        if self._space.may_defer and not self._request.clip and self._request.fixed is None:
            yield from self._fillings_beside_gradients(start)

    def _fillings_beside_gradients(self, first: Candidate) -> Iterator[Candidate]:
        """Of the whole space, with room for gradients whose updates are left to the next forward: where nothing waits
        for the norm, memory is otherwise full without them."""
        try:
            start = Start(self._candidates).deepest("deferred")
        except PlanInfeasible:
            return
        for candidate in self._filler.fillings(start, self._searches_widely):
            yield self._candidates.of(replace(candidate.placement, update=first.placement.update))

    def _fillings_of(self, space: Space | None) -> Iterator[Candidate]:
        """Of another space; none where nothing of it fits."""
        if space is None:
            return
        candidates = Candidates(self._model, self._hardware, self._budget, self._request, space)
        try:
            start = Start(candidates).deepest(first_mode(space))
        except PlanInfeasible:
            return
        yield from Filler(candidates).fillings(start, self._searches_widely)

    @property
    def _searches_widely(self) -> bool:
        return len(self._model.units) <= _WIDELY and self._hardware.device != "cpu"

    def _spaces_of_others(self) -> Iterator[Space]:
        """Of the policies of the field: their plans are ours, too, where ours found none that is better. Of a large
        model without those that overlap nothing."""
        if self._request.fixed is not None or not self._searches_freely or not self._model.calls:
            return
        known = set()
        for policy in POLICIES.values():
            space = _try_space(replace(self._request, policy=policy.name))
            choices = replace(policy, name="", source="")
            if space is None or policy.name == "auto" or choices in known or (self._is_large and policy.in_turn):
                continue
            known.add(choices)
            yield space

    def _bound(self, candidate: Candidate) -> float:
        """What no way to update makes faster: as if all were left to the next forward, and the CPU took no time."""
        placement = candidate.placement
        units = tuple(replace(where, defers=where.states != "none") for where in placement.units)
        may_visit = self._variants.may_visit and any(where.states == "host" for where in placement.units)
        free = replace(self._hardware, update_params_per_s=float("inf")) if may_visit else self._hardware
        return busiest(self._model, replace(placement, units=units, update="deferred"), free)

    def _recomputed(self, candidate: Candidate) -> float:
        pairs = zip(self._model.calls, candidate.placement.acts, strict=True)
        return sum(recomputed_flops(call, kept) for call, kept in pairs)

    def _better(self, best: Timed | None, candidate: Candidate) -> Timed:
        if best is not None and self._bound_of(candidate.placement) >= best.seconds:
            return best
        found = self._time(candidate)
        return best if best is not None and best.seconds <= found.seconds else found

    def _bound_of(self, placement: Placement) -> float:
        return lower_bound(self._model, placement, self._hardware)

    def _time(self, candidate: Candidate) -> Timed:
        return self._estimate(candidate) if self._is_large else self._simulate(candidate)

    def _time_whole(self, found: Timed) -> Timed:
        return self._simulate(found.candidate) if self._is_large else found

    def _estimate(self, candidate: Candidate) -> Timed:
        """As much above the bound as a step of fewer units is."""
        coarse = in_few_parts(self._model, candidate.placement)
        fewer, thin = thinned(self._model, self._candidates.kinds, coarse, _WIDELY / len(self._model.units))
        plan = self._lowered(fewer, thin)
        seconds, bottleneck = step_seconds(plan, self._hardware)
        over = seconds / lower_bound(fewer, thin, self._hardware)
        found = Timed(candidate, plan, over * lower_bound(self._model, coarse, self._hardware), bottleneck)
        self._estimated.append(found)
        return found

    def _simulate(self, candidate: Candidate) -> Timed:
        plan = self._lowered(self._model, candidate.placement)
        return Timed(candidate, plan, *step_seconds(plan, self._hardware))

    def _lowered(self, model: ModelProfile, placement: Placement) -> Plan:
        plan = lower_step(model, placement)
        self._simulated += sum(len(ops) for ops in {id(ops): ops for ops in plan.rounds()}.values())
        return plan


def _near(found: Timed) -> float:
    return _NEAR_VISITING if found.candidate.placement.visits else _NEAR


def _kind(found: Timed) -> tuple[bool, str, bool]:
    """What estimates tell apart less well than how memory is filled."""
    placement = found.candidate.placement
    keeps = any(kept.tape or kept.everything for kept in placement.acts)
    return placement.visits, placement.update if placement.visits else "", keeps and placement.visits


def _try_space(request: PlanRequest) -> Space | None:
    """None where the user's wishes are not within the policy."""
    try:
        return space_of(request)
    except UsageError:
        return None


def first_mode(space: Space) -> str:
    """What memory is filled for; which updates then run when is looked at later."""
    return "overlap" if space.update == "auto" else space.update
