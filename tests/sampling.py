"""How much of what is tried at random is tried in every run of the tests; all of it under -m full."""

from collections import Counter
from collections.abc import Iterable

import pytest

whole = False  # set when the tests are collected


def examples(count: int) -> int:
    """Of a property."""
    return count if whole else -(-count // 3)


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Of the cases of a test that is marked `sampled(n)` every n-th is tried in every run, in the order of its
    parameters: n that no number of them is a multiple of lets each value of each parameter have its turn."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(pytest.mark.full)
            seen[name] += 1
