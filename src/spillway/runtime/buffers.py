"""What modules keep of a forward. Buffers, such as running means, are changed once a step, not once a computation; of
a forward on tensors without content nothing stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Undo what the model's modules keep of a forward inside: in attributes, or in dicts, lists and sets that are
    attributes."""
    before = [
        (vars(module), {name: (value, _content(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for own, known in before:
            for name in own.keys() - known.keys():
                del own[name]
            for name, (value, content) in known.items():
                own[name] = value
                if content is not None and not _is_same(_content(value), content):
                    _refill(value, content)


def _content(value: object) -> list[Any] | None:
    """Of a container; None for anything else."""
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value) if isinstance(value, (list, set)) else None


def _is_same(content: list[Any] | None, before: list[Any]) -> bool:
    same = content is not None and len(content) == len(before)
    return same and all(one is other for one, other in zip(content or [], before, strict=True))


def _refill(container: Any, content: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


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
