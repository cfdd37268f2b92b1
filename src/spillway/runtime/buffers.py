"""What modules keep of a forward: buffers such as running means, tables, counts. It changes once a step, not once a
computation; and of a forward on tensors without content nothing stays."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spillway.model.attributes import Attributes
from spillway.model.units import Unit


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
        """Within, a call is computed a second time: what it changes is undone."""
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
    """What modules keep, to be put back: attributes, what is in those that are dicts, lists or sets, the contents of
    tensors and the states of generators among all of these."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self._attributes = [Attributes.of(module) for module in self.modules]
        items = [item for known in self._attributes for item in known.items()]
        tensors = {id(item): item for item in items if _is_plain(item)}
        self._generators = [(item, item.get_state()) for item in items if isinstance(item, torch.Generator)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._versions = [tensor._version for tensor, _ in self._tensors]

    def is_changed(self) -> bool:
        """Whether anything is another, or was written to as far as versions tell. Waits for no device."""
        pairs = zip(self.modules, self._attributes, strict=True)
        moved = any(not known.are_those_of(module) for module, known in pairs)
        drawn = any(not torch.equal(generator.get_state(), state) for generator, state in self._generators)
        return moved or drawn or self._versions != [tensor._version for tensor, _ in self._tensors]

    def is_written_unseen(self) -> bool:
        """Whether contents changed behind the version counter's back, as batch norms change theirs."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return any(tensor._version == known and not torch.equal(tensor, old) for (tensor, old), known in pairs)

    def restore(self, is_unseen: bool) -> None:
        """Everything as it was. Tensors are written to only where they were, as graphs may need them unwritten: by
        their versions, or all where changes may be unseen."""
        for module, known in zip(self.modules, self._attributes, strict=True):
            known.restore(module)
        for generator, state in self._generators:
            generator.set_state(state)
        known_versions = zip(self._tensors, self._versions, strict=True)
        _refill_tensors([kept for kept, known in known_versions if is_unseen or kept[0]._version != known])


def _is_plain(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) and not item.is_inference()


def _refill_tensors(before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, content in before:
        tensor.data.copy_(content)  # as it was, also to graphs that keep it: no change to be counted
