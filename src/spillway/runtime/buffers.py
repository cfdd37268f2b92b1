"""What modules keep of a forward: buffers such as running means, tables, counts. It changes once a step, not once a
computation; and of a forward on tensors without content nothing stays."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spillway.model.attributes import Attributes
from spillway.model.units import Unit
from spillway.spec.errors import UsageError

# Of a tensor that a module holds: so large a one is not copied in every forward for its backward.
_LARGE = 1 << 16


class BufferGuard:
    """What the modules of a unit keep is in backward, where a call is computed again, what it was in its forward,
    whoever changed it since: the call itself (which is watched for in every forward), or what the model does between
    its calls. Afterwards it is as it was."""

    def __init__(self) -> None:
        # Calls in which contents were compared, with what their modules trained; and those that changed some unseen.
        self._compared: set[tuple[str, int, tuple[bool, ...]]] = set()
        self._unseen: set[tuple[str, int, tuple[bool, ...]]] = set()
        self._before: dict[int, _Kept] = {}  # per call
        self._changing: dict[int, bool] = {}  # calls that changed something, and whether unseen

    def is_quiet(self, call: int) -> bool:
        """Whether the last forward of a call left everything as it was."""
        return call not in self._changing

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
        self._before[call] = before
        self._changing.pop(call, None)
        if key in self._unseen or before.is_changed():
            self._changing[call] = key in self._unseen
        else:
            before.forget_large()

    @contextmanager
    def again(self, call: int) -> Iterator[None]:
        """Within, a call is computed a second time: what it changes is undone. Raises UsageError where it cannot begin
        with what it began with."""
        before, is_unseen = self._before[call], self._changing.get(call, False)
        if call not in self._changing and not before.is_changed():
            yield
            return
        after = _Kept(before.modules)
        written = before.restore(is_unseen)
        try:
            yield
        finally:
            after.restore(is_unseen, written)


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
        self._tensors: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (tensor, tensor.detach().clone()) for tensor in tensors.values()
        ]
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
        return any(
            old is not None and tensor._version == known and not torch.equal(tensor, old)
            for (tensor, old), known in pairs
        )

    def forget_large(self) -> None:
        """Give the copies of large tensors back."""
        self._tensors = [(tensor, None if tensor.nbytes > _LARGE else old) for tensor, old in self._tensors]

    def restore(self, is_unseen: bool, written: Collection[int] = ()) -> set[int]:
        """Everything as it was. Tensors are written to only where they were, as graphs may need them unwritten: by
        their versions, those `written` to by another call of this (which gives them), or all where changes may be
        unseen. Raises UsageError for one without a copy."""
        for module, known in zip(self.modules, self._attributes, strict=True):
            known.restore(module)
        for generator, state in self._generators:
            generator.set_state(state)
        changed = [
            (tensor, content)
            for (tensor, content), known in zip(self._tensors, self._versions, strict=True)
            if is_unseen or tensor._version != known or id(tensor) in written
        ]
        _refill_tensors(changed)
        return {id(tensor) for tensor, _ in changed}


def _is_plain(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) and not item.is_inference()


def _refill_tensors(before: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for tensor, content in before:
        if content is None:
            raise UsageError(
                f"a buffer of shape {tuple(tensor.shape)} was written to between the forward of its block and the "
                f"backward, which computes the block again: put a new tensor in its place instead, or write to it "
                f"before the forward"
            )
        tensor.data.copy_(content)  # as it was, also to graphs that keep it: no change to be counted
