"""How the tensors of a unit lie in its extent, its slot and its host buffers: the same order everywhere."""

from dataclasses import dataclass

import torch

from spillway.spec.sizes import align

PAGE = 4096
# Parameters start at multiples of 64 elements, so that views are aligned for every kernel.
_ELEMENTS = 64
_TRAINED = (torch.float32, torch.bfloat16)


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

    name: str  # weight, low, m, v
    offset: int
    num_bytes: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Weights first (trainable ones flat in one dtype, then frozen ones), then lower master half, m and v."""

    places: tuple[TensorPlace, ...]
    dtype: torch.dtype  # of the trainable part
    num_trainable: int  # elements with their padding
    weight_bytes: int
    components: tuple[Component, ...]

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradient of the trainable part, in whole pages."""
        return align(self.num_trainable * self.dtype.itemsize, PAGE)

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


def lay_out(params: list[tuple[str, tuple[int, ...], torch.dtype, bool]]) -> UnitLayout:
    """The layout of a unit's (name, shape, dtype, trainable) parameters.

    Raises ValueError where trainable parameters have other dtypes than float32 and bfloat16, or mixed ones.
    """
    dtypes = {dtype for _, _, dtype, trainable in params if trainable}
    if len(dtypes) > 1:
        raise ValueError(f"its trainable parameters mix {' and '.join(sorted(map(str, dtypes)))}")
    dtype = dtypes.pop() if dtypes else torch.float32
    if dtype not in _TRAINED:
        raise ValueError(f"its trainable parameters are {dtype}; train in torch.bfloat16 or torch.float32")
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
    components = [Component("weight", 0, weight_bytes, dtype.itemsize)]
    offset = weight_bytes
    sizes = (("low", 2), ("m", 4), ("v", 4)) if dtype is torch.bfloat16 else (("m", 4), ("v", 4))
    for name, size in sizes:
        if elements:
            num_bytes = align(elements * size, PAGE)
            components.append(Component(name, offset, num_bytes, size))
            offset += num_bytes
    return UnitLayout(tuple(places), dtype, elements, weight_bytes, tuple(components))
