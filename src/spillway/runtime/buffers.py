"""Buffers that a forward changes, such as running means: changed once a step, not once a computation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spillway.model.units import Unit


class BufferGuard:
    """Learns in a unit's first forward whether it changes its buffers, and keeps them as they are when the unit is
    computed again."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, bool], bool] = {}

    @contextmanager
    def first_time(self, unit: Unit) -> Iterator[None]:
        """The forward whose changes stay."""
        key = (unit.name, any(module.training for _, module in unit.members))
        if key in self._changes:
            yield
            return
        # Contents, not versions: batch norms write theirs behind the version counter's back.
        before = [(buffer, buffer.detach().clone()) for buffer in _buffers(unit)]
        yield
        self._changes[key] = any(not torch.equal(buffer, content) for buffer, content in before)

    @contextmanager
    def again(self, unit: Unit) -> Iterator[None]:
        """A computation whose changes are undone."""
        key = (unit.name, any(module.training for _, module in unit.members))
        with _kept(_buffers(unit) if self._changes.get(key, True) else []):
            yield


@contextmanager
def all_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what happens to the model's buffers inside."""
    with _kept(list(model.buffers())):
        yield


def _buffers(unit: Unit) -> list[torch.Tensor]:
    return [buffer for _, module in unit.members for buffer in module.buffers()]


@contextmanager
def _kept(buffers: list[torch.Tensor]) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in before:
                buffer.copy_(content)
