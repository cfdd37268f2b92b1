"""What modules keep of a forward: buffers such as running means, tables, counts. It changes once a step, not once a
computation; and of a forward on tensors without content nothing stays."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spillway.model.units import Unit

# Of a module: bound and unbound by others.
_NOT_KEPT = ("_parameters", "_modules")


class BufferGuard:
    """Learns in a unit's first forward whether it changes what its modules keep. Where it does, a call is computed
    again from what it began with, and that is afterwards as it was."""

    def __init__(self) -> None:
        self._changes: dict[tuple[str, bool], bool] = {}
        self._unseen: set[tuple[str, bool]] = set()  # of these, those whose changes only contents show
        self._before: dict[int, tuple[_Kept, bool]] = {}  # per call that is to be computed again, and whether unseen
        self._changing: set[int] = set()  # calls that changed something in their last forward

    def is_quiet(self, call: int) -> bool:
        """Whether the last forward of a call left everything as it was."""
        return call not in self._changing

    @contextmanager
    def first_time(self, unit: Unit, call: int) -> Iterator[None]:
        """The forward of a call, whose changes stay."""
        key = (unit.name, any(module.training for _, module in unit.members))
        if not self._changes.get(key, True):
            yield
            return
        before = _Kept(part for _, module in unit.members for part in module.modules())
        yield
        if key not in self._changes and before.is_written_unseen():
            self._unseen.add(key)
        changed = key in self._unseen or before.is_changed()
        self._changes[key] = changed or self._changes.get(key, False)
        (self._changing.add if changed else self._changing.discard)(call)
        if self._changes[key]:
            self._before[call] = before, key in self._unseen

    @contextmanager
    def again(self, call: int) -> Iterator[None]:
        """The same computation, whose changes are undone."""
        if call not in self._before:
            yield
            return
        before, is_unseen = self._before.pop(call)
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


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what happens to the model's buffers inside; what is made in attributes stays."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        _refill_tensors(before)


class _Kept:
    """What modules keep, to be put back: attributes, what is in those that are dicts, lists or sets, and the contents
    of tensors among all of these."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self._attributes = [_attributes(module) for module in self.modules]
        items = (item for known in self._attributes for value, content in known.values() for item in (value, *content))
        tensors = {id(item): item for item in items if _is_plain(item)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._versions = [tensor._version for tensor, _ in self._tensors]

    def is_changed(self) -> bool:
        """Whether anything is another, or was written to as far as versions tell. Waits for no device."""
        pairs = zip(self.modules, self._attributes, strict=True)
        moved = any(not _is_same(_attributes(module), known) for module, known in pairs)
        return moved or self._versions != [tensor._version for tensor, _ in self._tensors]

    def is_written_unseen(self) -> bool:
        """Whether contents changed behind the version counter's back, as batch norms change theirs."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return any(tensor._version == known and not torch.equal(tensor, old) for (tensor, old), known in pairs)

    def restore(self, is_unseen: bool) -> None:
        """Everything as it was. Tensors are written to only where they were, as graphs may need them unwritten: by
        their versions, or all where changes may be unseen."""
        for module, known in zip(self.modules, self._attributes, strict=True):
            own = vars(module)
            for name in _attributes(module).keys() - known.keys():
                del own[name]
            for name, (value, content) in known.items():
                own[name] = value
                if isinstance(value, (dict, list, set)) and not _are_same(_content(value), content):
                    _refill(value, content)
        known_versions = zip(self._tensors, self._versions, strict=True)
        _refill_tensors([kept for kept, known in known_versions if is_unseen or kept[0]._version != known])


def _attributes(module: nn.Module) -> dict[str, tuple[Any, list[Any]]]:
    return {name: (value, _content(value)) for name, value in vars(module).items() if name not in _NOT_KEPT}


def _content(value: object) -> list[Any]:
    """Of a container; nothing of anything else."""
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value) if isinstance(value, (list, tuple, set)) else []


def _is_plain(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) and not item.is_inference()


def _is_same(now: dict[str, tuple[Any, list[Any]]], before: dict[str, tuple[Any, list[Any]]]) -> bool:
    if now.keys() != before.keys():
        return False
    return all(_are_same([now[name][0], *now[name][1]], [value, *content]) for name, (value, content) in before.items())


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))


def _refill(container: Any, content: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _refill_tensors(before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, content in before:
            tensor.copy_(content)
