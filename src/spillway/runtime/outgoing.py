"""What of a call is on its way out of the device."""

import torch

from spillway.spec.errors import UsageError


class Outgoing:
    """Tensors to be copied, which nobody may change before they are."""

    def __init__(self, name: str, tensors: list[torch.Tensor]) -> None:
        """`name`: of the call, for messages."""
        self.tensors = tensors
        self._name = name
        self._versions = [tensor._version for tensor in tensors]

    def refuse_changed(self) -> None:
        """Raise UsageError where one was changed while it was copied, or before."""
        if self._versions != [tensor._version for tensor in self.tensors]:
            raise changed_since(self._name)


def changed_since(name: str) -> UsageError:
    """That an input of a call is no longer what it was."""
    return UsageError(
        f"an input of {name} was changed in place after the call (as in `x += block(x)`), so backward could not "
        f"compute it again: write x = x + ..., or ask for activations='keep'"
    )
