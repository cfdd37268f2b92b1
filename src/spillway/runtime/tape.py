"""Outputs of chosen operators of one call: recorded in its forward, replayed in backward instead of run again.

Works beneath autograd, where each operator arrives once, with plain tensors: autograd of the replaying forward saves
what is replayed, and what lies between is computed again.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from spillway.model.operators import class_of, is_plain
from spillway.runtime.held import Held, Outgoing, address_of
from spillway.spec.errors import UsageError, required
from spillway.spec.sizes import PAGE


@dataclass(slots=True)
class _Output:
    """What one operator gave: its tensors, in place or as the bytes that wait elsewhere; nothing where it has to run
    again."""

    func: Any
    leaves: list[Any]
    spec: TreeSpec


@dataclass(frozen=True, slots=True)
class _Moved:
    """A tensor whose bytes are elsewhere, `at` from the start of their slab."""

    at: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    byte_offset: Any

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        """The tensor again."""
        start = slab.storage_offset() + self.at + self.byte_offset
        empty = torch.empty(0, dtype=self.dtype, device=slab.device)
        return empty.set_(slab.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Part:
    """Of one micro-batch. `returned`: by address of their storage, what of it that waits here the call gave to others,
    too, who may change it. (What is recorded beneath autograd does not share in the count of changes.)"""

    outputs: list[_Output] = field(default_factory=list)
    returned: dict[int, Held] = field(default_factory=dict)

    def held(self, output: _Output) -> list[Held]:
        """What of this output the call gave to others, too."""
        leaves = (leaf for leaf in output.leaves if isinstance(leaf, torch.Tensor))
        return [self.returned[address] for address in map(address_of, leaves) if address in self.returned]

    def waiting(self) -> set[int]:
        """Addresses of the storages of all that waits where it is."""
        leaves = (leaf for output in self.outputs for leaf in output.leaves)
        return {address_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}

    def let_go(self) -> None:
        """Of what waits elsewhere by now."""
        for address in self.returned.keys() - self.waiting():
            del self.returned[address]


class Tape:
    """Of one call, micro-batch by micro-batch."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self.classes = frozenset(classes)
        self._parts: list[_Part] = []
        self._slab: torch.Tensor | None = None

    def record(self) -> "Recorder":
        """The context in which a micro-batch is computed for the first time."""
        self._parts.append(_Part())
        return Recorder(self.classes, self._parts[-1].outputs)

    def note(self, outputs: list[torch.Tensor]) -> None:
        """These are what the micro-batch gave. What is not on the tape is not held, either: nobody counts it."""
        waiting = self._parts[-1].waiting()
        for output in outputs:
            if address_of(output) in waiting:
                self._parts[-1].returned[address_of(output)] = Held.of(output)

    def release(self, outgoing: Outgoing) -> None:
        """Let go of the bytes that are to be moved away. What does not fit stays, and what is smaller than a page."""
        for part, output in [(one, output) for one in self._parts for output in one.outputs]:
            for place, leaf in enumerate(output.leaves):
                if not isinstance(leaf, torch.Tensor):
                    continue
                content = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(leaf.untyped_storage())
                if content.numel() < PAGE:
                    continue
                others = [part.returned[address] for address in [address_of(leaf)] if address in part.returned]
                at = outgoing.put(content, others)
                if at is None:
                    continue
                offset = leaf.storage_offset() * leaf.itemsize
                output.leaves[place] = _Moved(at, leaf.dtype, leaf.shape, leaf.stride(), offset)
        for part in self._parts:
            part.let_go()

    def bring_back(self, slab: torch.Tensor | None) -> None:
        """What was moved is in this slab."""
        self._slab = slab

    def replay(self, index: int) -> "Replayer":
        """The context in which a micro-batch is computed again; what was kept of it is then forgotten here. What was
        changed since is made again: nothing of the tape draws random numbers."""
        part, self._parts[index] = self._parts[index], _Part()
        for output in part.outputs:
            if any(held.was_changed for held in part.held(output)):
                output.leaves.clear()
        return Replayer(self.classes, part.outputs, self._slab)


class Recorder(TorchDispatchMode):
    """Keeps outputs as they are made. One that is changed in place later is copied before."""

    supports_higher_order_operators = True

    def __init__(self, classes: frozenset[str], outputs: list[_Output]) -> None:
        super().__init__()
        self._classes = classes
        self._outputs = outputs
        self._where: dict[int, list[tuple[_Output, int]]] = {}  # address of a storage -> who keeps it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        kwargs = kwargs or {}
        if self._where and is_plain(func) and func._schema.is_mutable:
            self._save_from(func, args, kwargs)
        result = func(*args, **kwargs)
        if class_of(func, args, kwargs) in self._classes:
            leaves, spec = tree_flatten(result)
            output = _Output(func, [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
            self._outputs.append(output)
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    self._where.setdefault(address_of(leaf), []).append((output, place))
        return result

    def _save_from(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write:
                self._copy(value)
        for argument in func._schema.arguments:
            if argument.is_write and argument.name in kwargs:
                self._copy(kwargs[argument.name])

    def _copy(self, written: Any) -> None:
        for tensor in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(tensor, torch.Tensor):
                for output, place in self._where.pop(address_of(tensor), []):
                    output.leaves[place] = output.leaves[place].clone()


class Replayer(TorchDispatchMode):
    """Gives recorded outputs in the place of running their operators."""

    supports_higher_order_operators = True

    def __init__(self, classes: frozenset[str], outputs: list[_Output], slab: torch.Tensor | None) -> None:
        super().__init__()
        self._classes = classes
        self._left = iter(outputs)
        self._slab = slab

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, or not."""
        kwargs = kwargs or {}
        if class_of(func, args, kwargs) not in self._classes:
            return func(*args, **kwargs)
        output = next(self._left, None)
        if output is None or output.func is not func:
            raise UsageError(
                f"the forward of a unit ran {'nothing more' if output is None else output.func} where its backward "
                f"runs {func}: keep settings that choose kernels (torch.nn.attention.sdpa_kernel, backend flags), and "
                f"what a block reads of the outside, the same until backward is over"
            )
        if not output.leaves:
            return func(*args, **kwargs)
        leaves = [self._back(leaf) for leaf in output.leaves]
        output.leaves.clear()
        return tree_unflatten(leaves, output.spec)

    def _back(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Moved):
            return leaf
        slab = required(self._slab, "a tensor is wanted before it was brought back")
        return leaf.view(slab)
