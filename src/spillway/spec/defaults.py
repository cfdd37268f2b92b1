"""What stands in the place of a function that nobody gave."""

from typing import TypeVar

T = TypeVar("T")


def nothing(*_: object) -> None:
    """Nobody waits for it."""


def as_it_is(value: T) -> T:
    """The same."""
    return value
