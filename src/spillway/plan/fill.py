"""Ways to fill memory from a start: with what saves most."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from spillway.plan.bounds import is_held_up_by_recomputing, lower_bound
from spillway.plan.candidates import Candidate, Candidates, Change, with_part
from spillway.plan.swap import EVERYTHING, Output, best_amount, with_outputs
from spillway.spec.plan import ON_THE_DEVICE, Kept, Placement, UnitPlacement

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
    (("inputs", "host"), ("grads", "host"), ("weights", "host"), ("weights", "device"), ("inputs", "device")),
    (("inputs", "host"), ("inputs", "device"), ("grads", "host"), ("weights", "host"), ("weights", "device")),
)  # fmt: skip
# States stay on the drives, where updates may be taken back: they need not wait for the norm.
_STATES_STAY = (("inputs", "host"), ("grads", "host"), ("weights", "host"))
# Inputs of units stay on the drives, too: outputs of operators take the host memory.
_INPUTS_STAY = (("grads", "host"),)
# Nothing takes device memory that activations on their way could use.
_OFF_THE_DEVICE = (("inputs", "host"), ("grads", "host"), ("weights", "host"), ("states", "host"))
# Activations are moved off the device in the best of the other placements, by their bounds.
_SWAPPED_FROM = 3
_NEARER = {"disk": ("host", "device"), "host": ("device",), "device": ()}


class Filler:
    """Fills memory for one model, machine, budget and space of choices."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._model = candidates.model
        self._hardware = candidates.hardware
        self._budget = candidates.budget
        self._request = candidates.request
        self._space = candidates.space
        self._device_is_host = candidates.device_is_host
        # What became of a candidate (held, so that its id stays its own): orders have their beginnings in common.
        self._grown: dict[tuple[int, str, str], tuple[Candidate, Candidate]] = {}

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
            shallow = self._candidates.of(replace(lowest.placement, window=1, grad_slots=1))
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
        for start in {start.placement: start for start in (*starts[:_SWAPPED_FROM], plain[0])}.values():
            yield self._swap(start, start)
        apart = self.fill(lowest, _INPUTS_STAY)
        yield self._swap(apart, apart)
        for base in (lowest, self._candidates.of(replace(lowest.placement, window=1, grad_slots=1))):
            far = self.fill(base, _OFF_THE_DEVICE)
            swapped = self._swap(far, far)
            yield swapped
            yield self.fill(swapped)
        if may_move:
            yield self.fill(self._swap(lowest, lowest), _STATES_STAY)
            yield self.fill(self._swap(lowest, starts[0]))
            for level in keeps if "device" in space.kept_in else ():
                yield self.fill(self._swap(self._keep(lowest, "device", level), starts[0]))

    def neighbours(self, placement: Placement) -> Iterator[Candidate]:
        """All that fit and differ in where one unit rests, or in what is kept of one call."""
        space = self._space
        for unit, where in enumerate(placement.units):
            if where.states == "none" or unit in self._model.resident_units:
                continue
            for weights, states in product(space.weights, space.states):
                if states != "device" or weights == "device":
                    grads = "device" if states == "device" else "host"
                    moved = replace(where, weights=weights, states=states, grads=grads)
                    yield from self._if_it_fits(with_part(placement, "units", _put(placement.units, unit, moved)))
        for call, kept in enumerate(placement.acts):
            for other in self._ways_to_keep(call):
                if other != kept:
                    yield from self._if_it_fits(with_part(placement, "acts", _put(placement.acts, call, other)))

    def _ways_to_keep(self, number: int) -> Iterator[Kept]:
        space = self._space
        yield from map(Kept, space.inputs)
        for tier, level in product(space.kept_in, space.keeps):
            kept = self._kept(number, tier, level)
            if kept is not None:
                yield kept

    def _if_it_fits(self, placement: Placement) -> Iterator[Candidate]:
        found = self._candidates.of(placement)
        if self._candidates.fits(found):
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
                filled = self._candidates.grow(candidate, "acts", calls, self._nearer_input(tier))
            elif part in ("units", "all"):
                filled = self._candidates.grow(candidate, "units", units, self._onto_the_device(part == "all"))
            else:
                filled = self._candidates.grow(candidate, "units", units, self._nearer(part, tier))
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
                return ON_THE_DEVICE if where.weights == "device" else None
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
            return ON_THE_DEVICE

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
            if not self._model.calls[index].flops and placement.acts[index].tier == tier:
                return None  # takes no time to compute again
            return self._kept(index, tier, level)

        return self._candidates.grow(candidate, "acts", list(reversed(range(len(self._model.calls)))), change)

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
            candidate = self._candidates.grow(candidate, "acts", left, partial(_wanted, wanted))
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


def _put(values: tuple[Any, ...], number: int, value: object) -> list[Any]:
    return [*values[:number], value, *values[number + 1 :]]


def _wanted(wanted: tuple[Kept, ...], _: Placement, call: int) -> Kept:
    return wanted[call]
