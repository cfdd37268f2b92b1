"""The simple planner: the deepest pipeline that fits with everything on disk, then host memory filled with what saves
most traffic per byte."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from spillway.plan.bounds import lower_bound
from spillway.plan.check import check
from spillway.plan.lower import lower, lower_step
from spillway.plan.memory import peaks
from spillway.plan.pools import SlabNames
from spillway.plan.simulate import simulate, step_seconds
from spillway.spec.errors import PlanInfeasible, UsageError
from spillway.spec.hardware import Budget, HardwareSpec
from spillway.spec.model import ModelProfile
from spillway.spec.plan import (
    ACTIVATIONS,
    LAST_POINT,
    TIERS,
    UPDATE_MODES,
    KeepPoints,
    Placement,
    Plan,
    Pool,
    TierPeaks,
    UnitPlacement,
    act_tier,
    keeps_all,
    kept_in,
)
from spillway.spec.sizes import format_size, format_size_up

# Deepest pipeline first. Elements per subgroup: large enough for the drive, small enough that slabs stay cheap.
_WINDOWS = (4, 3, 2, 1)
_SUBGROUPS = ((1 << 24, 4), (1 << 23, 4), (1 << 22, 4), (1 << 22, 2), (1 << 20, 2), (1 << 18, 1))
# Of the optimizer states: fewer than that in host memory are not worth losing a saved point at every step.
_WORTHWHILE_SHARE = 0.25
# Of the updates that could be made within the step: how many are left to the next forward.
_DEFERRED_SHARES = (0.25, 0.5, 1.0)
# Of the calls whose activations are not kept on the device: for how many they are moved to host memory and back.
_SWAPPED_SHARES = (0.5, 1.0)
# Of the ways to fill memory, the best by their bounds.
_SIMULATED = 3
# Smaller parts may fit where one did not; after so many of a kind no more are tried.
_MISSES = 3


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user fixed; 'auto' leaves the choice to the planner."""

    update: str = "auto"
    weights: str = "auto"
    states: str = "auto"
    clip: bool = False
    accumulation: int = 1
    has_store: bool = True
    keep: KeepPoints = LAST_POINT
    activations: str = "auto"  # one of ACTIVATIONS
    fixed: Placement | None = None  # units already rest where it says: only the step is planned


@dataclass(frozen=True, slots=True)
class _Candidate:
    placement: Placement
    pools: tuple[Pool, ...]
    peaks: TierPeaks


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


def make_plan(model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest) -> Plan:
    """The plan that training executes.

    Raises PlanInfeasible naming the tier that is short and the smallest budget that works, UsageError where forced
    choices contradict each other.
    """
    planner = _Planner(model, hardware, budget, request)
    if not model.calls:
        # Nothing is known yet of what activations take: half of what is left stays theirs.
        planner = _Planner(model, hardware, _half_of(budget), request)
    fillings = sorted(
        planner.fillings(planner.deepest()), key=lambda found: lower_bound(model, found.placement, hardware)
    )
    best, *_ = _fastest(model, hardware, fillings[:_SIMULATED])
    best, seconds, bottleneck = _fastest(model, hardware, planner.variants(best))
    plan = lower(model, best.placement)
    check(plan)
    notes = _notes(best, request)
    wary = simulate(plan.wary_ops, plan.pools, hardware).seconds
    plan = replace(plan, step_seconds=seconds, wary_step_seconds=wary, bottleneck=bottleneck)
    return replace(plan, peaks=best.peaks, notes=notes)


def _fastest(
    model: ModelProfile, hardware: HardwareSpec, candidates: "Iterable[_Candidate]"
) -> tuple["_Candidate", float, str]:
    """The one with the shortest step, its seconds and its bottleneck."""
    timed = ((found, *step_seconds(lower_step(model, found.placement), hardware)) for found in candidates)
    return min(timed, key=lambda found: found[1])


def _half_of(budget: Budget) -> Budget:
    ours = budget.host_bytes - budget.process_bytes
    return replace(budget, device_bytes=budget.device_bytes // 2, host_bytes=budget.process_bytes + ours // 2)


def _update_mode(request: PlanRequest) -> str:
    if request.fixed is not None:
        return request.fixed.update
    if request.update == "auto":
        return "deferred" if request.clip and request.accumulation > 1 else "overlap"
    if request.update == "overlap" and request.clip and request.accumulation > 1:
        raise UsageError(
            "update='overlap' cannot clip gradients of several backward calls: use update='deferred' (or 'auto'), "
            "or max_grad_norm=None"
        )
    if request.update not in UPDATE_MODES:
        raise UsageError(f"update='{request.update}' is not one of auto, {', '.join(UPDATE_MODES)}")
    return request.update


class _Planner:
    def __init__(self, model: ModelProfile, hardware: HardwareSpec, budget: Budget, request: PlanRequest) -> None:
        self._model = model
        self._budget = budget
        self._request = request
        self._update = _update_mode(request)
        self._device_is_host = hardware.device == "cpu"
        for name, tier in (("weights", request.weights), ("states", request.states)):
            if tier not in ("auto", *TIERS):
                raise UsageError(f"{name}='{tier}' is not one of auto, {', '.join(TIERS)}")
            if tier == "disk" and not request.has_store:
                raise UsageError(f"{name}='disk' needs a store: give the path of a directory on a fast drive")

        if request.activations == "disk" and not request.has_store:
            raise UsageError("activations='disk' needs a store: give the path of a directory on a fast drive")
        if request.activations not in ACTIVATIONS:
            raise UsageError(f"activations='{request.activations}' is not one of {', '.join(ACTIVATIONS)}")
        if request.states == "device" and request.weights not in ("auto", "device"):
            raise UsageError(f"states='device' needs the weights there too, not weights='{request.weights}'")

    def deepest(self) -> _Candidate:
        """The deepest pipeline that fits with everything as far from the device as the user allows."""
        smallest: _Candidate | None = None
        for window in _WINDOWS:
            for subgroup, slabs in _SUBGROUPS:
                smallest = self._candidate(self._lowest(window, subgroup, slabs))
                if self._fits(smallest):
                    return smallest
        if smallest is None:
            raise UsageError("there is no pipeline depth to try")
        raise PlanInfeasible(self._shortage(smallest), smallest.peaks)

    def fillings(self, lowest: _Candidate) -> Iterator[_Candidate]:
        """Ways to fill memory: with weights and states first, or with activations that need not be recomputed; on the
        device or, across the link, in host memory and on disk."""
        wanted, may_move = self._request.activations, self._request.fixed is None
        if wanted in TIERS:
            yield self._fill(self._keep_in(lowest, wanted, 1.0))
            return
        filled = self._fill(lowest)
        if wanted == "recompute":
            yield filled
            return
        kept = self._keep_in(filled, "device", 1.0)
        if self._keeps_every_call(kept):
            yield kept
            return
        if wanted == "auto" or not may_move:
            yield kept
        if may_move:
            yield self._fill(self._keep_in(lowest, "device", 1.0))
        if self._device_is_host:
            return
        for share in _SWAPPED_SHARES:
            yield self._keep_in(kept, "host", share)
        if may_move:
            yield self._fill(self._keep_in(self._keep_in(lowest, "device", 1.0), "host", 1.0))

    def _keeps_every_call(self, candidate: _Candidate) -> bool:
        pairs = zip(self._model.calls, candidate.placement.acts, strict=True)
        return all(keeps_all(acts) for call, acts in pairs if call.kind == "FORWARD")

    def _keep_in(self, candidate: _Candidate, tier: str, share: float) -> _Candidate:
        """Keep what autograd saves of some of the calls that are still recomputed, where it fits; the last calls first,
        whose backward comes first."""
        acts = candidate.placement.acts
        calls = [
            index
            for index, call in reversed(list(enumerate(self._model.calls)))
            if call.kind == "FORWARD" and not keeps_all(acts[index])
        ]
        chosen = [call for turn, call in enumerate(calls) if int((turn + 1) * share) > int(turn * share)]
        return self._take(candidate, [_Upgrade("acts", call, kept_in(tier)) for call in chosen])

    def _fill(self, candidate: _Candidate) -> _Candidate:
        """Move what saves most traffic per byte into memory while it fits."""
        for (part, _), group in groupby(self._upgrades(candidate.placement), key=lambda step: (step.part, step.tier)):
            filled = self._take(candidate, list(group))
            if part != "states" or self._worth_it(filled):
                candidate = filled
        return candidate

    def _take(self, candidate: _Candidate, steps: list["_Upgrade"]) -> _Candidate:
        """As many of these as fit, the first ones first; by halves, so that a long list takes few trials."""
        at, stride, misses = 0, len(steps), 0
        while at < len(steps) and misses < _MISSES:
            stride = min(stride, len(steps) - at)
            placement = candidate.placement
            for step in steps[at : at + stride]:
                placement = step(placement)
            upgraded = self._candidate(placement)
            if self._fits(upgraded):
                candidate, at = upgraded, at + stride
            elif stride > 1:
                stride //= 2
            else:
                at, misses = at + 1, misses + 1
        return candidate

    def _worth_it(self, candidate: _Candidate) -> bool:
        """States in memory save traffic and wear, but steps between saved points can be lost. Unless the user
        said so, that is not done for a small share of them."""
        if self._request.states != "auto" or not self._request.has_store:
            return True
        sizes = [
            (unit.state_bytes, where.states != "disk")
            for unit, where in zip(self._model.units, candidate.placement.units, strict=True)
        ]
        on_host = sum(size for size, host in sizes if host)
        return on_host >= _WORTHWHILE_SHARE * sum(size for size, _ in sizes)

    def _lowest(self, window: int, subgroup: int, slabs: int) -> Placement:
        request, far = self._request, "disk" if self._request.has_store else "host"
        acts = tuple(far for _ in self._model.calls)
        if request.fixed is not None:
            return Placement(
                request.fixed.units, acts, self._update, request.clip, request.accumulation, window, slabs, subgroup
            )
        weights = far if request.weights == "auto" else request.weights
        states = far if request.states == "auto" else request.states
        if states == "device":
            weights = "device"
        waits = (self._update != "overlap" or request.clip) and request.accumulation == 1
        grads = "device" if states == "device" else far if waits else "host"
        units = []
        for index, unit in enumerate(self._model.units):
            resident = index == self._model.resident_unit
            trained = unit.num_trainable > 0
            units.append(UnitPlacement("device" if resident else weights, states if trained else "none", grads))
        return Placement(tuple(units), acts, self._update, request.clip, request.accumulation, window, slabs, subgroup)

    def _upgrades(self, start: Placement) -> Iterator["_Upgrade"]:
        """In order of traffic saved per byte: inputs of units (written and read once per step; the last calls first,
        for they come back first), gradients that wait for the norm, weights (read twice), then states."""
        for call in reversed(range(len(start.acts))):
            if not keeps_all(start.acts[call]):
                yield _Upgrade("acts", call, "host")
        if self._request.fixed is not None:
            return
        for unit, where in enumerate(start.units):
            if where.grads == "disk" and where.states != "none":
                yield _Upgrade("grads", unit, "host")
        if self._request.weights == "auto":
            for unit in range(len(start.units)):
                yield _Upgrade("weights", unit, "host")
        if self._request.states == "auto":
            for unit, where in enumerate(start.units):
                if where.states != "none":
                    yield _Upgrade("states", unit, "host")
        if self._device_is_host:
            return
        if self._request.weights == "auto":
            for unit in range(len(start.units)):
                yield _Upgrade("weights", unit, "device")
        if self._request.weights in ("auto", "device") and self._request.states == "auto":
            for unit, where in enumerate(start.units):
                if where.states != "none":
                    yield _Upgrade("states", unit, "device")

    def _candidate(self, placement: Placement, deferred: Collection[int] = ()) -> _Candidate:
        if self._request.fixed is None:
            placement = replace(placement, units=tuple(self._with_deferring(placement, deferred)))
        pools = SlabNames(self._model, placement).all()
        stored = self._request.has_store
        extents = extents_of_units(placement, self._request.keep) if stored else (0,) * len(placement.units)
        process = self._budget.process_bytes
        tiers = peaks(self._model, placement, pools, process, self._device_is_host, extents)
        return _Candidate(placement, pools, tiers)

    def variants(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """The same resting places with more and more updates left to the next forward, so that the drive has work all
        step long; in the end with all of them."""
        request, placement = self._request, candidate.placement
        soon = [unit for unit, where in enumerate(placement.units) if where.states != "none" and not where.defers]
        if request.update != "auto" or request.fixed is not None or request.accumulation > 1 or not self._model.calls:
            yield candidate
            return
        if soon:
            yield candidate
        for share in _DEFERRED_SHARES if soon else (1.0,):
            left = {unit for turn, unit in enumerate(soon) if int((turn + 1) * share) > int(turn * share)}
            update = placement.update if share < 1 else "deferred"
            variant = self._candidate(replace(placement, update=update), left)
            if self._fits(variant):
                yield variant

    def _with_deferring(self, placement: Placement, deferred: Collection[int]) -> Iterator[UnitPlacement]:
        for unit, where in enumerate(placement.units):
            defers = where.states != "none" and (unit in deferred or self._must_defer(placement, where))
            yield where if where.defers == defers else replace(where, defers=defers)

    def _must_defer(self, placement: Placement, where: UnitPlacement) -> bool:
        """Whether a unit leaves its update to the next forward: as all do, or because a guess could not be taken back:
        nothing on disk holds what it changes, or the gradient is not at hand."""
        sure = where.states != "disk" or where.weights == "device" or where.grads != "host"
        return placement.update == "deferred" or (placement.speculates and sure)

    def _fits(self, candidate: _Candidate) -> bool:
        need, have = candidate.peaks, self._budget
        within = need.device <= have.device_bytes and need.host <= have.host_bytes
        return within and need.disk <= have.disk_bytes

    def _shortage(self, smallest: _Candidate) -> str:
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


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """Put one part of one unit (or call) into another tier."""

    part: str
    index: int
    tier: str

    def __call__(self, placement: Placement) -> Placement:
        if self.part == "acts":
            acts = placement.acts
            return replace(placement, acts=(*acts[: self.index], self.tier, *acts[self.index + 1 :]))
        units = list(placement.units)
        where = units[self.index]
        if self.part == "weights" and where.weights != "device":
            units[self.index] = replace(where, weights=self.tier)
        elif self.part == "states":
            if self.tier == "device":
                units[self.index] = UnitPlacement("device", "device", "device")
            else:
                units[self.index] = replace(where, states=self.tier)
        elif self.part == "grads":
            units[self.index] = replace(where, grads=self.tier)
        return replace(placement, units=tuple(units))


def _notes(candidate: _Candidate, request: PlanRequest) -> tuple[str, ...]:
    notes = []
    units = candidate.placement.units
    if request.has_store and any(where.states == "host" for where in units):
        notes.append("optimizer states rest in host memory: saved points are --save-steps apart")
    if any(where.grads == "disk" for where in units if where.states != "none"):
        notes.append("gradients wait on disk for the global norm: more host memory, or no clipping, avoids that")
    if any(act_tier(acts) == "disk" for acts in candidate.placement.acts):
        notes.append("inputs of units overflow to disk")
    return tuple(notes)
