"""What rests in different ways, alternately. Memory is filled from one end of the model to the other, so each way to
rest has all of its work at one end of the step, and its resource waits at the other. It takes as much memory."""

from collections import Counter
from dataclasses import replace
from typing import TypeVar

from spillway.plan.candidates import Candidate, Candidates

Way = TypeVar("Way")


def with_units_interleaved(candidates: Candidates, candidate: Candidate) -> Candidate:
    """With the resting places of units that are alike interleaved. The same candidate where they are."""
    placement = candidate.placement
    units = _among_alike(candidates.kinds.units, placement.units)
    return candidate if units == placement.units else candidates.updated_alike(replace(placement, units=units))


def with_acts_interleaved(candidates: Candidates, candidate: Candidate) -> Candidate:
    """With what is kept of calls that are alike interleaved. The same candidate where it is."""
    placement = candidate.placement
    acts = _among_alike(candidates.kinds.calls, placement.acts)
    return candidate if acts == placement.acts else candidates.updated_alike(replace(placement, acts=acts))


def _among_alike(kinds: list[int], ways: tuple[Way, ...]) -> tuple[Way, ...]:
    alike: dict[int, list[int]] = {}
    for place, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(place)
    found = list(ways)
    for places in alike.values():
        for place, way in zip(places, interleaved([ways[place] for place in places]), strict=True):
            found[place] = way
    return tuple(found)


def interleaved(ways: list[Way]) -> list[Way]:
    """The same in another order: of each way's places the distances are as equal as may be."""
    counts = Counter(ways)
    due, found = dict.fromkeys(counts, 0.0), list[Way]()
    for _ in ways:
        for way, count in counts.items():
            due[way] += count / len(ways)
        found.append(max(due, key=lambda way: due[way]))
        due[found[-1]] -= 1
    return found
