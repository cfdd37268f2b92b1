"""What modules keep of a forward: buffers such as running means, tables, counts. It changes once a step, not once a
computation; and of a forward on tensors without content nothing stays."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from spillway.model.units import Unit

# Of a module: bound and unbound by others.
_NOT_KEPT = ("_parameters", "_modules")


class BufferGuard:
    """Watches in every forward of a unit whether it changes what its modules keep. Where it does, the call is computed
    again from what it began with, and that is afterwards as it was."""

    def __init__(self) -> None:
        # Calls in which contents were compared, with what their modules trained; and those that changed some unseen.
        self._compared: set[tuple[str, int, tuple[bool, ...]]] = set()
        self._unseen: set[tuple[str, int, tuple[bool, ...]]] = set()
        self._before: dict[int, tuple[_Kept, bool]] = {}  # per call that changed something, and whether unseen

    def is_quiet(self, call: int) -> bool:
        """Whether the last forward of a call left everything as it was."""
        return call not in self._before

    @contextmanager
    def first_time(self, unit: Unit, call: int) -> Iterator[None]:
        """The forward of a call, whose changes stay."""
        modules = [part for _, module in unit.members for part in module.modules()]
        key = (unit.name, call, tuple(module.training for module in modules))
        before = _Kept(modules)
        yield
        if key not in self._compared:  # waits for the device, so once
            self._compared.add(key)
            if before.is_written_unseen():
                self._unseen.add(key)
        self._before.pop(call, None)
        if key in self._unseen or before.is_changed():
            self._before[call] = before, key in self._unseen

    @contextmanager
    def again(self, call: int) -> Iterator[None]:
        """The same computation, whose changes are undone."""
        if call not in self._before:
            yield
            return
        before, is_unseen = self._before[call]
        after = _Kept(before.modules)
        before.restore(is_unseen)
        try:
            yield
        finally:
            after.restore(is_unseen)


@contextmanager
def nothing_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo what these modules keep of a forward inside, in buffers and in attributes."""
    before = _Kept(modules)
    try:
        yield
    finally:
        before.restore(is_unseen=True)


class _Kept:
    """What modules keep, to be put back: attributes, what is in those that are dicts, lists or sets, and the contents
    of tensors among all of these."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self._attributes = [_Attributes.of(module) for module in self.modules]
        items = (item for known in self._attributes for item in known.items())
        tensors = {id(item): item for item in items if _is_plain(item)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._versions = [tensor._version for tensor, _ in self._tensors]

    def is_changed(self) -> bool:
        """Whether anything is another, or was written to as far as versions tell. Waits for no device."""
        pairs = zip(self.modules, self._attributes, strict=True)
        moved = any(not known.are_those_of(module) for module, known in pairs)
        return moved or self._versions != [tensor._version for tensor, _ in self._tensors]

    def is_written_unseen(self) -> bool:
        """Whether contents changed behind the version counter's back, as batch norms change theirs."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return any(tensor._version == known and not torch.equal(tensor, old) for (tensor, old), known in pairs)

    def restore(self, is_unseen: bool) -> None:
        """Everything as it was. Tensors are written to only where they were, as graphs may need them unwritten: by
        their versions, or all where changes may be unseen."""
        for module, known in zip(self.modules, self._attributes, strict=True):
            known.restore(module)
        known_versions = zip(self._tensors, self._versions, strict=True)
        _refill_tensors([kept for kept, known in known_versions if is_unseen or kept[0]._version != known])


@dataclass(frozen=True, slots=True)
class _Attributes:
    """Of a module; and by name, what is in those that are containers and not empty."""

    values: dict[str, Any]
    contents: dict[str, list[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "_Attributes":
        own = vars(module)
        return cls(own.copy(), {name: _content(value) for name, value in own.items() if _holds(name, value) and value})

    def items(self) -> Iterator[Any]:
        """All that was found."""
        return chain(self.values.values(), *self.contents.values())

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether the module still has the same. Made for speed: it runs in every forward."""
        own = vars(module)
        if own.keys() != self.values.keys() or not all(map(is_, own.values(), self.values.values())):
            return False
        for name, value in own.items():
            if _holds(name, value) and value and not _are_same(_content(value), self.contents.get(name, [])):
                return False
        return all(map(own.__getitem__, self.contents))  # what was filled is not empty now

    def restore(self, module: nn.Module) -> None:
        """Let the module have them again."""
        own = vars(module)
        for name in own.keys() - self.values.keys():
            del own[name]
        for name, value in self.values.items():
            own[name] = value
            if _holds(name, value) and not isinstance(value, tuple):
                known = self.contents.get(name, [])
                if not _are_same(_content(value), known):
                    _refill(value, known)


def _holds(name: str, value: object) -> bool:
    return isinstance(value, (dict, list, set, tuple)) and name not in _NOT_KEPT


def _content(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


def _is_plain(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) and not item.is_inference()


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _refill(container: Any, content: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _refill_tensors(before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, content in before:
        tensor.data.copy_(content)  # as it was, also to graphs that keep it: no change to be counted
