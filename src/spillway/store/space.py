"""Who lies where in the striped address space."""

from collections.abc import Collection
from itertools import pairwise

from spillway.spec.errors import invariant
from spillway.store.disk import Extent


def overlap(extents: Collection[Extent]) -> tuple[Extent, Extent] | None:
    """Two of these ranges that differ and share bytes; None where none do."""
    in_order = sorted(set(extents), key=lambda extent: extent.offset)
    return next((pair for pair in pairwise(in_order) if pair[0].offset + pair[0].num_bytes > pair[1].offset), None)


class Space:
    """Hands out ranges around those that are taken already, the lowest that fits first."""

    def __init__(self, taken: list[Extent]) -> None:
        """Raises InvariantError where ranges overlap."""
        invariant(overlap(taken) is None, f"{overlap(taken)} overlap")
        self._taken = sorted(set(taken), key=lambda extent: extent.offset)

    @property
    def end(self) -> int:
        """The first byte after everything taken."""
        return self._taken[-1].offset + self._taken[-1].num_bytes if self._taken else 0

    def allocate(self, num_bytes: int) -> Extent:
        """A new range."""
        at = index = 0
        while index < len(self._taken) and self._taken[index].offset - at < num_bytes:
            at = self._taken[index].offset + self._taken[index].num_bytes
            index += 1
        made = Extent(at, num_bytes)
        self._taken.insert(index, made)
        return made
