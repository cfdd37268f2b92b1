"""What stands for a parameter while its values are elsewhere."""

from typing import Any

import torch
from torch import nn

from spillway.spec.errors import UsageError

_ALLOWED = (torch.ops.aten.detach.default,)  # by which nn.Parameter is made of it


class _Placeholder(torch.Tensor):
    """Says its shape, dtype and device, which models ask for, and has no values: an operator that is given it is
    refused. (One on the meta device would say so, and what a model moves there with it comes back as garbage.)"""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "_Placeholder":
        made: _Placeholder = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALLOWED:
            return cls(args[0].shape, args[0].dtype, args[0].device)
        raise UsageError(
            f"{func} was given a parameter of a model that streams, whose values are there only while the module that "
            f"holds it is called: use it in that module's forward, or ask spillway.api.read_parameters for it"
        )


def make_placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, trainable: bool) -> nn.Parameter:
    """A parameter without values."""
    return nn.Parameter(_Placeholder(shape, dtype, device), trainable)
