"""How far long work has come: told by whoever does it, to whoever shows it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Counter(Protocol):
    """Hears how much is done."""

    def advance(self, amount: float) -> None:
        """So much more is done."""


# What is done and how much it is in all (bytes, say): inside the context that comes back, a counter hears of it.
Counting = Callable[[str, float], AbstractContextManager[Counter]]
