"""Tensors that a call needs for its backward, and whether they are still what they were."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from spillway.spec.errors import UsageError
from spillway.spec.sizes import PAGE, align


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that waits where it is; `version` counts the changes that were made to it, or to a view of it, in
    place."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Held":
        """As it is now, without its graph."""
        return cls(tensor.detach(), tensor._version)

    @property
    def was_changed(self) -> bool:
        """Whether it is no longer what it was."""
        return self.tensor._version != self.version

    def unchanged(self, name: str) -> torch.Tensor:
        """The tensor. Raises UsageError, naming the call, where it was changed since."""
        if self.was_changed:
            raise UsageError(
                f"an input or output of {name} that its backward needs was changed in place after the call, as "
                f"`x += block(x)` does: write x = x + block(x)"
            )
        return self.tensor


def address_of(tensor: torch.Tensor) -> int:
    """Of its storage: the same for all that lie in it."""
    return tensor.untyped_storage().data_ptr()


class Outgoing:
    """What of a call is on its way out of the device, to a slab of `capacity` bytes; `moves` has each tensor with where
    it will lie there. `name`: of the call, for messages."""

    def __init__(self, name: str, capacity: int) -> None:
        self.moves: list[tuple[int, torch.Tensor]] = []
        self._name = name
        self._capacity = capacity
        self._end = 0
        self._held: list[Held] = []

    def put(self, tensor: torch.Tensor, held: Iterable[Held]) -> int | None:
        """Where the tensor will lie, in bytes from the start of the slab: after those before it, at a whole page. None
        where there is no room for it. `held`: those whose bytes it is, which nobody may change before it is copied."""
        at, num_bytes = self._end, tensor.numel() * tensor.itemsize
        if at + num_bytes > self._capacity:
            return None
        self.moves.append((at, tensor))
        self._held += held
        self._end += align(num_bytes, PAGE)
        return at

    def refuse_changed(self) -> None:
        """Raise UsageError where one was changed while it was copied, or before."""
        for held in self._held:
            held.unchanged(self._name)
