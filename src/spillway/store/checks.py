"""Checksums of what lies in an extent: one value for every piece of a fixed, canonical size."""

import base64
import functools
from array import array
from dataclasses import dataclass

import torch

from spillway import native
from spillway.spec.sizes import PAGE, align
from spillway.store.layout import Component, UnitLayout

# Elements per piece of a trained array. Parts of an array may end within one: they are checked in their order.
PIECE_ELEMENTS = 1 << 18
_FROZEN_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of an extent whose pieces have one size (the last may be shorter)."""

    offset: int
    num_bytes: int
    piece_bytes: int
    first: int  # index of its first piece

    @property
    def count(self) -> int:
        return -(-self.num_bytes // self.piece_bytes)


class ExtentChecks:
    """The checksums of one extent of a unit, kept up as its content is written front to back, piece by piece."""

    def __init__(self, layout: UnitLayout) -> None:
        self._regions = _regions(layout)
        self.values = array("I", bytes(4 * sum(region.count for region in self._regions)))

    def feed(self, offset: int, content: torch.Tensor, threads: int = 1) -> None:
        """`content` (uint8, on the CPU) was or will be written at `offset` of the extent. A piece may come in several
        parts, in their order."""
        stop = offset + content.numel()
        for region in self._regions:
            begin, end = max(offset, region.offset), min(stop, region.offset + region.num_bytes)
            if begin >= end:
                continue
            inside, piece = begin - region.offset, region.piece_bytes
            index = region.first + inside // piece
            for fresh in range(region.first + -(-inside // piece), region.first + -(-(end - region.offset) // piece)):
                self.values[fresh] = 0
            left = piece - inside % piece
            address = content.data_ptr() + begin - offset
            native.checksum(address, end - begin, min(left, end - begin), piece, self.values, index, threads)

    def fill_zero(self) -> None:
        """The whole extent reads as zeros."""
        for region in self._regions:
            for index in range(region.count):
                left = region.num_bytes - index * region.piece_bytes
                self.values[region.first + index] = _of_zeros(min(left, region.piece_bytes))

    def first_difference(self, other: "ExtentChecks") -> tuple[int, int] | None:
        """Offset in the extent and bytes of the first piece whose content differs."""
        for region in self._regions:
            for index in range(region.count):
                at = region.first + index
                if self.values[at] != other.values[at]:
                    start = index * region.piece_bytes
                    return region.offset + start, min(region.piece_bytes, region.num_bytes - start)
        return None

    def to_text(self) -> str:
        """Base 64 of the little-endian values."""
        return base64.b64encode(self.values.tobytes()).decode()

    @staticmethod
    def from_text(layout: UnitLayout, text: str) -> "ExtentChecks":
        """What `to_text` gave. Raises ValueError where it is of another layout."""
        made = ExtentChecks(layout)
        content = base64.b64decode(text)
        if len(content) != len(made.values) * made.values.itemsize:
            raise ValueError("the checksums are of another layout")
        made.values = array("I", content)
        return made

    def copy_part(self, other: "ExtentChecks", part: Component) -> None:
        """Take over the values of one array of the unit."""
        for region in self._regions:
            if part.offset <= region.offset < part.offset + part.num_bytes:
                stop = region.first + region.count
                self.values[region.first : stop] = other.values[region.first : stop]

    def copy_from(self, other: "ExtentChecks") -> None:
        """Take over the values of another extent of the same unit."""
        self.values = array("I", other.values)


def _regions(layout: UnitLayout) -> tuple[_Region, ...]:
    found: list[_Region] = []

    def add(offset: int, num_bytes: int, piece_bytes: int) -> None:
        if num_bytes > 0:
            first = found[-1].first + found[-1].count if found else 0
            found.append(_Region(offset, num_bytes, piece_bytes, first))

    for part in layout.components:
        trained = align(part.bytes_of(layout.num_trainable), PAGE)
        add(part.offset, trained, part.bytes_of(PIECE_ELEMENTS))
        add(part.offset + trained, part.num_bytes - trained, _FROZEN_PIECE)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _of_zeros(num_bytes: int) -> int:
    zeros = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    value = array("I", [0])
    native.checksum(zeros.data_ptr(), num_bytes, num_bytes, num_bytes, value, 0, 1)
    return value[0]
