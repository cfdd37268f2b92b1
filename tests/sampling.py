"""How much of what is tried at random is tried in every run of the tests; all of it under -m full."""

from collections.abc import Iterable
from typing import Any

import pytest

whole = False  # set when the tests are collected


def examples(count: int) -> int:
    """Of a property."""
    return count if whole else -(-count // 3)


def sampled(every: Iterable[tuple[Any, ...]], sample: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Of cases: those of the sample; and under -m full all."""
    chosen = list(sample)
    marks = {case: () if case in chosen else (pytest.mark.full,) for case in every}
    assert all(case in marks for case in chosen)
    return [pytest.param(*case, marks=kept) for case, kept in marks.items()]
