import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.spec.sizes import PAGE
from spillway.store.checks import PIECE_ELEMENTS, ExtentChecks
from spillway.store.layout import lay_out

PARAMS = [("a", (PIECE_ELEMENTS + 5000,), torch.bfloat16, True), ("f", (700_001,), torch.float32, False)]


def content_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (lay_out(PARAMS).extent_bytes,), dtype=torch.uint8, generator=generator)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, lay_out(PARAMS).extent_bytes // PAGE - 1), max_size=6), threads=st.integers(1, 3))
def test_however_an_extent_is_written_its_checksums_are_the_same(cuts: list[int], threads: int) -> None:
    layout, content = lay_out(PARAMS), content_of(0)
    whole, parts = ExtentChecks(layout), ExtentChecks(layout)
    whole.feed(0, content)
    edges = [0, *sorted(cut * PAGE for cut in set(cuts)), content.numel()]
    for begin, end in itertools.pairwise(edges):
        parts.feed(begin, content[begin:end], threads)
    assert parts.first_difference(whole) is None
    assert ExtentChecks.from_text(layout, parts.to_text()).first_difference(whole) is None


@settings(max_examples=25, deadline=None)
@given(bit=st.integers(0, 8 * lay_out(PARAMS).extent_bytes - 1))
def test_a_flipped_bit_is_found_where_it_is(bit: int) -> None:
    layout, content = lay_out(PARAMS), content_of(1)
    before, after = ExtentChecks(layout), ExtentChecks(layout)
    before.feed(0, content)
    content[bit // 8] ^= 1 << bit % 8
    after.feed(0, content)
    found = after.first_difference(before)
    assert found is not None
    offset, size = found
    assert offset <= bit // 8 < offset + size


def test_rewriting_a_subgroup_replaces_its_pieces_only() -> None:
    layout, old, new = lay_out(PARAMS), content_of(2), content_of(3)
    checks, expected = ExtentChecks(layout), ExtentChecks(layout)
    checks.feed(0, old)
    mixed = old.clone()
    for part in layout.components:
        size = PIECE_ELEMENTS * part.element_bytes
        piece = new[part.offset : part.offset + size]
        mixed[part.offset : part.offset + size] = piece
        checks.feed(part.offset, piece)
    expected.feed(0, mixed)
    assert checks.first_difference(expected) is None


def test_fresh_space_has_the_checksums_of_zeros() -> None:
    layout = lay_out(PARAMS)
    fresh, zeros = ExtentChecks(layout), ExtentChecks(layout)
    fresh.fill_zero()
    zeros.feed(0, torch.zeros(layout.extent_bytes, dtype=torch.uint8))
    assert fresh.first_difference(zeros) is None
