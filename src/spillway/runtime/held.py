"""Tensors that a call needs for its backward, and whether they are still what they were."""

from dataclasses import dataclass

import torch

from spillway.spec.errors import UsageError


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

    def unchanged(self, name: str) -> torch.Tensor:
        """The tensor. Raises UsageError, naming the call, where it was changed since."""
        if self.tensor._version != self.version:
            raise UsageError(
                f"an input or output of {name} that its backward needs was changed in place after the call, as "
                f"`x += block(x)` does: write x = x + block(x)"
            )
        return self.tensor


def address_of(tensor: torch.Tensor) -> int:
    """Of its storage: the same for all that lie in it."""
    return tensor.untyped_storage().data_ptr()


class Outgoing:
    """What of a call is on its way out of the device: tensors to be copied. `held`: those whose bytes they are, which
    nobody may change before. `name`: of the call, for messages."""

    def __init__(self, name: str, tensors: list[torch.Tensor], held: list[Held]) -> None:
        self.tensors = tensors
        self._name = name
        self._held = held

    def refuse_changed(self) -> None:
        """Raise UsageError where one was changed while it was copied, or before."""
        for held in self._held:
            held.unchanged(self._name)
