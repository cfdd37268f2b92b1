import itertools

from hypothesis import given
from hypothesis import strategies as st

from spillway.store.disk import Extent
from spillway.store.space import Space


@given(taken=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5))), sizes=st.lists(st.integers(1, 8), max_size=6))
def test_new_ranges_never_overlap_those_that_hold_something(taken: list[tuple[int, int]], sizes: list[int]) -> None:
    at, kept = 0, []
    for gap, size in taken:
        kept.append(Extent(at + gap, size))
        at += gap + size
    space = Space(kept)
    everything = sorted([*kept, *(space.allocate(size) for size in sizes)], key=lambda extent: extent.offset)
    for before, after in itertools.pairwise(everything):
        assert before.offset + before.num_bytes <= after.offset
    assert space.end == max((extent.offset + extent.num_bytes for extent in everything), default=0)
