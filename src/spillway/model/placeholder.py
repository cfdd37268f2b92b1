"""What stands for a parameter while its values are elsewhere."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from spillway.spec.errors import UsageError


class ReadElsewhere(UsageError):
    """A parameter was used while no module that holds it is called. `name`: the parameter's."""

    def __init__(self, func: Any, name: str) -> None:
        super().__init__(
            f"{func} was given {name}, a parameter of a model that streams, whose values are there only while the "
            f"module that holds it is called: ask spillway.api.read_parameters for it; if the model's own forward uses "
            f"it elsewhere, show that by an example= batch before weights come to rest"
        )
        self.name = name


_ALLOWED = (torch.ops.aten.detach.default,)  # by which nn.Parameter is made of it


class _Placeholder(torch.Tensor):
    """Says its shape, dtype and device, which models ask for, and has no values: an operator that is given it is
    refused. (One on the meta device would say so, and what a model moves there with it comes back as garbage.)"""

    _name: str  # of the parameter, for messages

    @staticmethod
    def __new__(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "_Placeholder":
        made: _Placeholder = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._name = name
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: what is pickled would be nothing but its shape."""
        raise UsageError(
            f"{self._name} has no values to save, they rest in the store: spillway.save_pretrained and "
            f"spillway.save_point write them, spillway.api.read_parameters gives them"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALLOWED:
            return cls(args[0]._name, args[0].shape, args[0].dtype, args[0].device)
        raise ReadElsewhere(func, next(leaf._name for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)))


def make_placeholder(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, trainable: bool
) -> nn.Parameter:
    """A parameter without values."""
    return nn.Parameter(_Placeholder(name, shape, dtype, device), trainable)
