"""What autograd recorded of a call, kept from its forward to its backward: on the device, or elsewhere meanwhile."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spillway.runtime.held import Held, Outgoing, address_of
from spillway.runtime.window import Gradients
from spillway.spec.errors import UsageError, required

_SLOT = -1


def bypass(name: str) -> UsageError:
    """That backward reached the inside of a call by another way than its outputs."""
    return UsageError(
        f"the loss depends on something that was computed within {name} and is not what it returns (an attribute that "
        f"it sets, for instance), and what that needs for its backward is not kept: return it"
    )


@dataclass(frozen=True, slots=True)
class Root:
    """An output to differentiate, without its values; `edge` is None where it needs no gradient."""

    edge: GradientEdge | None
    shape: torch.Size

    @classmethod
    def of(cls, output: torch.Tensor) -> "Root":
        """Of a tensor."""
        return cls(get_gradient_edge(output) if output.requires_grad else None, output.shape)


@dataclass(frozen=True, slots=True)
class Like:
    """What the gradient of an input looks like, and whether there may be one."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    needed: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, needed: bool) -> "Like":
        """Of this one."""
        return cls(tensor.shape, tensor.dtype, tensor.device, needed)

    def empty(self) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Place:
    """All that is kept of a tensor whose bytes are elsewhere: which storage (or the slot), and where in it."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: Any
    byte_offset: Any


class Graph:
    """The graph of one call, micro-batch by micro-batch.

    Weights are not kept: their slot serves other units before backward. With `moves`, neither are the bytes of other
    tensors: `release` gives them away, `bring_back` tells where they are again. `shared`: inputs that others keep, too.
    `name`: of the call, for messages.
    """

    def __init__(
        self,
        name: str,
        slot: torch.Tensor,
        leaves: dict[str, torch.Tensor],
        inputs: list[torch.Tensor],
        shared: list[torch.Tensor],
        moves: bool,
    ) -> None:
        self.name = name
        self._is_back = False
        self.likes = [Like.of(tensor, tensor.requires_grad) for tensor in inputs]
        self._moves = moves
        self._leaves = leaves
        self._device = slot.device
        self._slot_address = address_of(slot)
        self._slot_start = slot.storage_offset()
        self._shared = {address_of(tensor) for tensor in shared}
        self._numbers: dict[int, int] = {}  # address of a storage that is held -> its number
        self._bytes: dict[int, torch.Tensor] = {}  # number -> its bytes, while they are on the device
        self._held: dict[int, list[Held]] = {}  # number -> tensors that lie in it, while they are
        self._offsets: dict[int, int] = {}  # number -> where its bytes lie in the slab
        self._slab: torch.Tensor | None = None
        self._slot: torch.Tensor | None = None
        self._inputs: list[list[torch.Tensor]] = []
        self._roots: list[list[Root]] = []

    # Forward #

    def pack(self, tensor: torch.Tensor) -> Held | _Place:
        """What autograd keeps of a tensor; with its version, for autograd looks at none where others keep for it."""
        address = address_of(tensor)
        start = tensor.storage_offset() * tensor.itemsize
        if address == self._slot_address:
            return _Place(_SLOT, tensor.dtype, tensor.shape, tensor.stride(), start - self._slot_start)
        # Kernels on a device save some tensors of the host: the seed of attention's dropout, for one.
        elsewhere = tensor.device != self._device
        if not self._moves or elsewhere or address in self._shared or not tensor.numel():
            return Held.of(tensor)
        number = self._numbers.setdefault(address, len(self._numbers))
        if number not in self._bytes:
            self._bytes[number] = _bytes_of(tensor)
        self._held.setdefault(number, []).append(Held.of(tensor))
        return _Place(number, tensor.dtype, tensor.shape, tensor.stride(), start)

    def note(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """A micro-batch is computed."""
        self._inputs.append(inputs)
        self._roots.append([Root.of(output) for output in outputs])

    def release(self, outgoing: Outgoing) -> None:
        """Let go of the bytes that are to be moved away. What does not fit (a kernel that saves more than the profiled
        one) stays."""
        for number, content in list(self._bytes.items()):
            at = outgoing.put(content, self._held[number])
            if at is not None:
                self._offsets[number] = at
                del self._bytes[number], self._held[number]
        for inputs in self._inputs:
            for tensor in inputs:
                if address_of(tensor) not in self._shared:
                    # Autograd needs the leaf for its gradient only, and looks at nothing but its shape.
                    tensor.data = tensor.new_empty(()).expand(tensor.shape) if tensor.numel() else tensor.data

    # Backward #

    def bring_back(self, slot: torch.Tensor, gradients: Gradients | None, slab: torch.Tensor | None) -> None:
        """The unit is in a slot again, what was moved in a slab."""
        self._slot, self._slab, self._is_back = slot, slab, True
        if gradients is not None:
            for name, leaf in self._leaves.items():
                gradients.collect(name, leaf)

    def unpack(self, kept: Held | _Place) -> torch.Tensor:
        """The tensor again. Raises UsageError where it was changed, and outside of the call's own backward."""
        self.refuse_bypass()
        if isinstance(kept, Held):
            return kept.unchanged(self.name)
        for held in self._held.get(kept.storage, ()):
            held.unchanged(self.name)
        found = self._slot if kept.storage == _SLOT else self._bytes.get(kept.storage, self._slab)
        base = required(found, "a tensor was moved away and its slab did not come back")
        start = base.storage_offset() + self._offsets.get(kept.storage, 0)
        empty = torch.empty(0, dtype=kept.dtype, device=base.device)
        offset = (start + kept.byte_offset) // kept.dtype.itemsize
        return empty.set_(base.untyped_storage(), offset, kept.shape, kept.stride)

    def refuse_bypass(self, _: object = None) -> None:
        """Raise UsageError outside of the call's own backward."""
        if not self._is_back:
            raise bypass(self.name)

    def take(self, index: int) -> tuple[list[torch.Tensor], list[Root]]:
        """Inputs and outputs of a micro-batch, which are then forgotten here."""
        found = self._inputs[index], self._roots[index]
        self._inputs[index], self._roots[index] = [], []
        return found

    def close(self) -> None:
        """Backward is over, or will not come: let go of everything. Autograd's nodes hold this object and it holds
        them, so nobody else would."""
        self._slot, self._slab, self._is_back = None, None, False
        self._inputs, self._roots, self._bytes, self._held = [], [], {}, {}
        for leaf in self._leaves.values():
            leaf.grad = None
        self._leaves = {}  # whose hooks hold this


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
