"""Streams weights from a source into the store, a bounded window at a time."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from spillway.checkpoint.sources import WeightSource
from spillway.model.units import Unit
from spillway.optim.update import split_master
from spillway.spec.sizes import PAGE, align
from spillway.store.checks import PIECE_ELEMENTS
from spillway.store.layout import TensorPlace, UnitLayout
from spillway.store.placed import PlacedStore

_WINDOW_BYTES = 64 << 20
# Windows of lower halves, some of which stay zero, are whole pieces of the checksums.
_PIECE_BYTES = 2 * PIECE_ELEMENTS


def load_weights(
    store: PlacedStore, units: tuple[Unit, ...], source: WeightSource, progress: Callable[[int], None]
) -> None:
    """Put every unit to rest with its master weights; moments are zero (fresh extents and arena pages are).

    float32 sources keep all their bits in the master even where the unit computes in bfloat16. `progress` is called
    with the bytes of each window.
    """
    # A float16 weight's master takes twice as much as it; what a bfloat16 one has below it as much.
    parts = 3 if any(unit.layout.dtype is torch.float16 for unit in units) else 2
    staging = store.staging(2 * _WINDOW_BYTES, "loading weights", parts * _PIECE_BYTES)
    room = staging.numel() // parts // _PIECE_BYTES * _PIECE_BYTES
    for index, unit in enumerate(units):
        layout = unit.layout
        for start in range(0, layout.weight_bytes, room):
            size = min(room, layout.weight_bytes - start)
            weight, below = staging[:size], staging[room : room + (parts - 1) * size]
            weight.zero_()
            below.zero_()
            has_more = False
            for place in layout.places:
                has_more |= _fill(layout, place, source, start, weight, below)
            store.homes.write_component(index, "weight", start, weight)
            if has_more:
                _put_below(store, index, layout, start, size, below)
            progress(size)
        source.done(place.name for place in layout.places)


def _put_below(store: PlacedStore, index: int, layout: UnitLayout, start: int, size: int, below: torch.Tensor) -> None:
    """Put what masters have beside their 16-bit weights to rest, of a window of the weights: the lower half of each, or
    its upper 8 bits, or for float16 the whole master."""
    first, low, master = start // 2, layout.component("low"), layout.component("master")
    if master is not None:
        at, part, found = first * master.element_bytes, master, below[: 2 * size]
    elif low is not None:
        at, part, found = first * low.element_bytes, low, below[:size]
        if low.element_bytes == 1:
            upper = (found.view(torch.int16).to(torch.int32) >> 8).to(torch.uint8)
            found = found[: align(upper.numel(), PAGE)]  # in place: what is written lies at whole pages
            found.zero_()[: upper.numel()] = upper
    else:
        return
    if at < part.num_bytes:
        store.homes.write_component(index, part.name, at, found[: part.num_bytes - at])


def _fill(
    layout: UnitLayout, place: TensorPlace, source: WeightSource, start: int, weight: torch.Tensor, below: torch.Tensor
) -> bool:
    """Put the part of a parameter that lies in this window of the unit's weights; whether masters have more."""
    begin, end = layout.byte_range(place)
    first, last = max(begin, start), min(end, start + weight.numel())
    if first >= last:
        return False
    item = place.dtype.itemsize
    elements = source.read(place.name, (first - begin) // item, (last - begin) // item)
    window = slice(first - start, last - start)
    target = weight[window].view(place.dtype)
    if place.trainable and place.dtype is torch.float16:
        master = below[2 * window.start : 2 * window.stop].view(torch.float32)
        master.copy_(elements)
        target.copy_(master)
        return True
    if place.trainable and place.dtype is torch.bfloat16 and elements.dtype in (torch.float32, torch.float16):
        upper, lower = split_master(elements.float())
        target.copy_(upper)
        below[window].view(torch.int16).copy_(lower)
        return True
    target.copy_(elements)
    return False


class ByteSource(Protocol):
    """The arrays of units at rest, as bytes."""

    def stream(self, unit: int, name: str, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces (uint8, on the CPU) of the unit's array `name` with their offsets from `begin`; each is valid until
        the next piece of that array."""


class StoreBytes:
    """A ByteSource over an open store, between steps. One array at a time."""

    def __init__(self, store: PlacedStore) -> None:
        self._store = store

    def stream(self, unit: int, name: str, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See ByteSource."""
        staging = self._store.staging(align(min(_WINDOW_BYTES, end - begin), PAGE) + 2 * PAGE, "reading weights")
        step = staging.numel() - 2 * PAGE
        for start in range(begin, end, step):
            stop = min(start + step, end)
            yield start - begin, self._store.homes.read_component(unit, name, start, stop, staging)


def read_parameter(source: ByteSource, unit: int, place: TensorPlace, layout: UnitLayout) -> torch.Tensor:
    """The whole parameter as it is at rest, a new tensor on the CPU."""
    begin, end = layout.byte_range(place)
    result = torch.empty(place.shape, dtype=place.dtype, device="cpu")
    flat = result.view(-1).view(torch.uint8) if result.numel() else result.view(-1)
    for start, piece in source.stream(unit, "weight", begin, end):
        flat[start : start + piece.numel()].copy_(piece)
    return result
