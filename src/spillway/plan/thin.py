"""A step with fewer of its like units: takes a fraction of the time to simulate, and tells plans apart as well."""

from dataclasses import replace
from math import ceil

from spillway.plan.pools import ELEMENT_ALIGNMENT, Kinds
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Placement
from spillway.spec.sizes import align

# Updates are simulated in so many parts.
_PARTS = 2


def thinned(model: ModelProfile, kinds: Kinds, placement: Placement, share: float) -> tuple[ModelProfile, Placement]:
    """The model and the placement with about this share of the units: of those that are alike, rest alike and are
    called once, every so-many-th; of each kind at least one. All others stay."""
    kept = _kept_units(model, kinds, placement, share)
    number = {unit: index for index, unit in enumerate(kept)}
    calls = [index for index, call in enumerate(model.calls) if call.unit in number]
    fewer = replace(
        model,
        units=tuple(model.units[unit] for unit in kept),
        calls=tuple(replace(model.calls[index], unit=number[model.calls[index].unit]) for index in calls),
        resident_units=frozenset(number[unit] for unit in model.resident_units),
    )
    units = tuple(placement.units[unit] for unit in kept)
    return fewer, replace(placement, units=units, acts=tuple(placement.acts[index] for index in calls))


def _kept_units(model: ModelProfile, kinds: Kinds, placement: Placement, share: float) -> list[int]:
    calls: dict[int, list[int]] = {}
    for index, call in enumerate(model.calls):
        calls.setdefault(call.unit, []).append(index)
    seen: dict[object, int] = {}
    kept = []
    for unit, where in enumerate(placement.units):
        own = calls.get(unit, [])
        if len(own) != 1 or unit in model.resident_units:
            kept.append(unit)
            continue
        kind = (kinds.units[unit], kinds.calls[own[0]], where, placement.acts[own[0]])
        turn = seen[kind] = seen.get(kind, -1) + 1
        if ceil((turn + 1) * share) > ceil(turn * share):
            kept.append(unit)
    return kept


def in_few_parts(model: ModelProfile, placement: Placement) -> Placement:
    """With subgroups so large that the list is a fraction as long; its time differs by a few percent, and by about as
    much for every placement. Not where parts travel to the device, whose way there is what counts."""
    if placement.visits:
        return placement
    largest = max(unit.num_trainable for unit in model.units)
    return replace(placement, subgroup=max(placement.subgroup, align(-(-largest // _PARTS), ELEMENT_ALIGNMENT)))
