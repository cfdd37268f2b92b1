"""Buffers that a forward changes, such as running means: changed once a step, not once a computation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spillway.model.units import Unit


class BufferGuard:
    """Learns in a unit's first forward whether it changes its buffers. Where it does, a call is computed again from
    those that it began with, and they are afterwards as they were."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, bool], bool] = {}
        self._before: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # per call: buffers and their contents

    def changes(self, unit: Unit) -> bool:
        """Whether the unit's forward changes them, as far as is known."""
        return self._changes.get(_key(unit), True)

    @contextmanager
    def first_time(self, unit: Unit, call: int) -> Iterator[None]:
        """The forward of a call, whose changes stay."""
        key = _key(unit)
        if not self._changes.get(key, True):
            yield
            return
        # Contents, not versions: batch norms write theirs behind the version counter's back.
        before = self._before[call] = [(buffer, buffer.detach().clone()) for buffer in _buffers(unit)]
        yield
        if key not in self._changes:
            self._changes[key] = any(not torch.equal(buffer, content) for buffer, content in before)
            if not self._changes[key]:
                del self._before[call]

    @contextmanager
    def again(self, call: int) -> Iterator[None]:
        """The same computation, whose changes are undone."""
        before = self._before.pop(call, [])
        with _kept([buffer for buffer, _ in before]):
            for buffer, content in before:
                buffer.copy_(content)
            yield


@contextmanager
def all_buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what happens to the model's buffers inside."""
    with _kept(list(model.buffers())):
        yield


def _key(unit: Unit) -> tuple[str, bool]:
    return unit.name, any(module.training for _, module in unit.members)


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
