"""Puts tensors in the place of a unit's parameters, and takes them out again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from spillway.model.placeholder import make_placeholder
from spillway.model.units import Unit


def bind(unit: Unit, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let every slot of the unit look up `tensors` by parameter name."""
    for slot in unit.slots:
        slot.module._parameters[slot.attribute] = tensors[slot.name]  # type: ignore[assignment]


@contextmanager
def bound(unit: Unit, tensors: Mapping[str, torch.Tensor], placeholders: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """`bind` for the duration of a block; afterwards the slots hold the placeholders again."""
    bind(unit, tensors)
    try:
        yield
    finally:
        bind(unit, placeholders)


def make_placeholders(units: tuple[Unit, ...], device: torch.device) -> dict[str, nn.Parameter]:
    """Parameters without values, of the same names, shapes, dtypes and need for gradients, on the device that computes.
    They stand in the module tree while a unit is not computing, and are what param_groups and schedulers see."""
    return {
        place.name: make_placeholder(place.name, place.shape, place.dtype, device, place.trainable)
        for unit in units
        for place in unit.layout.places
    }
