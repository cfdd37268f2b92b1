"""What rests in different ways, alternately."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plan import profiles
from spillway.plan.candidates import Candidates
from spillway.plan.interleave import interleaved, with_units_interleaved
from spillway.plan.lower import lower_step
from spillway.plan.request import PlanRequest, space_of
from spillway.plan.simulate import step_seconds
from spillway.plan.start import Start
from spillway.spec.hardware import Budget
from spillway.spec.plan import Placement


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_interleaved_the_same_come_as_evenly_spread_as_may_be(ways: list[str]) -> None:
    found = interleaved(ways)
    assert Counter(found) == Counter(ways)
    for way, count in Counter(ways).items():
        for end in range(len(ways) + 1):
            assert abs(found[:end].count(way) - end * count / len(ways)) < len(set(ways))


def test_units_on_the_drives_among_those_in_memory_take_less_time_and_as_much_room() -> None:
    model, request = profiles.chain(12, elements=1 << 22), PlanRequest()
    candidates = Candidates(model, profiles.MACHINE, Budget(1 << 40, 1 << 40, 1 << 45, 0), request, space_of(request))
    start = Start(candidates).deepest("overlap").placement
    near = [replace(where, weights="host", states="host") for where in start.units[:6]]
    halves = candidates.of(replace(start, units=(*near, *start.units[6:])))
    spread = with_units_interleaved(candidates, halves)
    assert spread.peaks == halves.peaks and spread.pools == halves.pools
    assert Counter(spread.placement.units) == Counter(halves.placement.units)
    assert seconds(model, spread.placement) < seconds(model, halves.placement)
    assert with_units_interleaved(candidates, spread) is spread


def seconds(model: profiles.ModelProfile, placement: Placement) -> float:
    return step_seconds(lower_step(model, placement), profiles.MACHINE)[0]
