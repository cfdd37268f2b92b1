"""Buffers that a forward changes, such as running means: changed once a step, not once a computation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spillway.model.units import Unit


def buffer_versions(unit: Unit) -> list[int]:
    """A number per buffer of the unit that grows with every change."""
    return [buffer._version for _, module in unit.members for buffer in module.buffers()]


@contextmanager
def buffers_kept(unit: Unit) -> Iterator[None]:
    """Undo what happens to the unit's buffers inside."""
    with _kept([buffer for _, module in unit.members for buffer in module.buffers()]):
        yield


@contextmanager
def all_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what happens to the model's buffers inside."""
    with _kept(list(model.buffers())):
        yield


@contextmanager
def _kept(buffers: list[torch.Tensor]) -> Iterator[None]:
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, content in before:
                if buffer._version != version:
                    buffer.copy_(content)
