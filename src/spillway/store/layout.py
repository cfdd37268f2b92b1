"""How the tensors of a unit lie in its extent, its slot and its host buffers: the same order everywhere."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from spillway.spec.sizes import PAGE, align
from spillway.spec.state import BLOCK, EXACT, StateFormat

# Parameters start at multiples of 64 elements, so that views are aligned for every kernel.
_ELEMENTS = 64
_TRAINED = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
_LOW = {16: torch.int16, 8: torch.uint8}  # what a bfloat16 weight's master has below it


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One parameter inside its unit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    start: int  # first element in the trainable part, or first byte after it for a frozen parameter
    numel: int


@dataclass(frozen=True, slots=True)
class Component:
    """One array of a unit's extent, starting at a whole page."""

    name: str  # weight, low or master, m, v, scales
    offset: int
    num_bytes: int
    dtype: torch.dtype
    element_bytes: int  # of a whole block
    block: int = 1  # elements that share one entry

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many trainable elements from the start; a block that is begun counts whole."""
        return -(-elements // self.block) * self.element_bytes


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Weights first (trainable ones flat in one dtype, then frozen ones), then what the optimizer keeps: the lower
    part of the master of bfloat16 weights or the whole one of float16 weights, moments, and their scales."""

    places: tuple[TensorPlace, ...]
    dtype: torch.dtype  # of the trainable part
    num_trainable: int  # elements with their padding
    weight_bytes: int
    components: tuple[Component, ...]
    state_format: StateFormat = EXACT

    @property
    def update_bytes(self) -> int:
        """Bytes of one trainable element in all its arrays and its gradient, rounded up."""
        per_block = sum(part.element_bytes * (BLOCK // part.block) for part in self.components)
        return -(-(per_block + self.dtype.itemsize * BLOCK) // BLOCK)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradient of the trainable part, in whole pages."""
        return align(self.num_trainable * self.dtype.itemsize, PAGE)

    @property
    def grad_gaps(self) -> list[tuple[int, int]]:
        """Byte ranges of the gradient that belong to no parameter."""
        found, at = [], 0
        for place in self.places:
            if place.trainable:
                start, stop = self.byte_range(place)
                found.append((at, start))
                at = stop
        return [(start, stop) for start, stop in [*found, (at, self.grad_bytes)] if start < stop]

    @property
    def state_bytes(self) -> int:
        """Bytes of everything but the weights."""
        return sum(part.num_bytes for part in self.components if part.name != "weight")

    @property
    def extent_bytes(self) -> int:
        """Bytes of the whole unit at rest."""
        return self.weight_bytes + self.state_bytes

    def component(self, name: str) -> Component | None:
        """The array of that name, if this unit has it."""
        return next((part for part in self.components if part.name == name), None)

    def byte_range(self, place: TensorPlace) -> tuple[int, int]:
        """First and last byte of a parameter within the weights."""
        start = place.start * self.dtype.itemsize if place.trainable else place.start
        return start, start + place.numel * place.dtype.itemsize

    def view(self, place: TensorPlace, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of a uint8 buffer that holds the unit's weights (or, if trainable, its gradient)."""
        start, stop = self.byte_range(place)
        return buffer[start:stop].view(place.dtype).view(place.shape)


def prevailing_dtype(counted: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The one that most elements have, of (dtype, number of elements); float32 where there are none."""
    totals: dict[torch.dtype, int] = {}
    for dtype, numel in counted:
        totals[dtype] = totals.get(dtype, 0) + numel
    return max(totals, key=lambda dtype: totals[dtype], default=torch.float32)


def lay_out(
    params: list[tuple[str, tuple[int, ...], torch.dtype, bool]], state_format: StateFormat = EXACT
) -> UnitLayout:
    """The layout of a unit's (name, shape, dtype, trainable) parameters.

    Raises ValueError where trainable parameters have other dtypes than float32, bfloat16 and float16, or mixed ones.
    """
    dtypes = {dtype for _, _, dtype, trainable in params if trainable}
    if len(dtypes) > 1:
        raise ValueError(f"its trainable parameters mix {' and '.join(sorted(map(str, dtypes)))}")
    dtype = dtypes.pop() if dtypes else torch.float32
    if dtype not in _TRAINED:
        raise ValueError(
            f"its trainable parameters are {dtype}; train in torch.bfloat16, torch.float16 or torch.float32"
        )
    places: list[TensorPlace] = []
    elements = 0
    for name, shape, kind, trainable in params:
        if trainable:
            numel = torch.Size(shape).numel()
            places.append(TensorPlace(name, shape, kind, True, elements, numel))
            elements += align(numel, _ELEMENTS)
    # At a whole page: an update writes whole pages and must not touch what is frozen.
    at = align(elements * dtype.itemsize, PAGE)
    for name, shape, kind, trainable in params:
        if not trainable:
            numel = torch.Size(shape).numel()
            places.append(TensorPlace(name, shape, kind, False, at, numel))
            at += align(numel * kind.itemsize, _ELEMENTS)
    weight_bytes = align(at, PAGE)
    components = [Component("weight", 0, weight_bytes, dtype, dtype.itemsize)]
    offset = weight_bytes
    for name, kind, size, block in _arrays(state_format, dtype) if elements else ():
        part = Component(name, offset, 0, kind, size, block)
        part = replace(part, num_bytes=align(part.bytes_of(elements), PAGE))
        components.append(part)
        offset += part.num_bytes
    return UnitLayout(tuple(places), dtype, elements, weight_bytes, tuple(components), state_format)


def laid_out_for(layout: UnitLayout, state_format: StateFormat) -> UnitLayout:
    """The same parameters with what another optimizer keeps."""
    if state_format == layout.state_format:
        return layout
    return lay_out([(place.name, place.shape, place.dtype, place.trainable) for place in layout.places], state_format)


def _arrays(state_format: StateFormat, dtype: torch.dtype) -> list[tuple[str, torch.dtype, int, int]]:
    """Name, dtype, bytes of an entry and elements of an entry of each array beside the weights."""
    moment, low = _MOMENTS[state_format.moments], _LOW[state_format.low_bits]
    found = {
        torch.bfloat16: [("low", low, low.itemsize, 1)],
        torch.float16: [("master", torch.float32, torch.float32.itemsize, 1)],
        torch.float32: [],
    }[dtype]
    found.append(("m", moment, moment.itemsize, 1))
    if state_format.has_v:
        found.append(("v", moment, moment.itemsize, 1))
    if state_format.moments == "8bit":
        found.append(("scales", torch.uint8, 2, BLOCK))
    return found
