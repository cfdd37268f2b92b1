"""Classes of operators: which outputs are worth keeping between forward and backward, and what each costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from spillway.spec.model import OperatorClass
from spillway.spec.sizes import PAGE, align

# Place of the left factor among the arguments; its last dimension is summed over.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_grouped_mm": 0}
_ATTENTION = "_scaled_dot_product_"
_ATTENTION_KINDS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
OTHER = "other"
_NOTHING: frozenset[int] = frozenset()


def class_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The class of an operator whose output may be kept; None of one that is cheap to run again.

    Matrix products are told apart by the length of the sum: their FLOPs per byte of output are equal to it, whatever
    the batch (Fuyou, table 2; LoHan, equation 6). Attention that drops at random is not kept: what is drawn after it
    would not be the same where it does not run.
    """
    if not is_plain(func) or func.namespace != "aten" or func._schema.is_mutable:
        return None
    name = func._schema.name.removeprefix("aten::")
    if name in _PRODUCTS:
        return f"matmul {args[_PRODUCTS[name]].shape[-1]}"
    if name == "convolution":
        return f"matmul {prod(args[1].shape[1:])}"
    if name.startswith(_ATTENTION) and not name.endswith("_backward"):
        return "attention" if _argument(func, "dropout_p", args, kwargs) in (None, 0.0) else None
    return None


def is_plain(func: Any) -> bool:
    """Whether it is an operator with a schema: not one that takes functions, as flex_attention does."""
    return isinstance(func, torch._ops.OpOverload)


def _mixes_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what an operator gives of a row depends on the others: statistics over a batch, or an embedding whose
    gradient is divided by how often an index is in it. (Norms of each instance are batch norms of one row.)"""
    if not is_plain(func):
        return False
    if "batch_norm" in func._schema.name:
        return bool(_argument(func, "training", args, kwargs)) and args[0].shape[0] > 1
    return bool(_argument(func, "scale_grad_by_freq", args, kwargs))


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator is given for this argument; None where that is left out, or it has none."""
    place = _place(func, name)
    return kwargs.get(name, args[place] if place is not None and place < len(args) else None)


@cache
def _place(func: Any, name: str) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else None


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs by operator: PyTorch's, which leave out products of groups (experts) and attention on the CPU, and before
    2.12 refuse one with fewer heads of keys and values than of queries."""
    kernels = [getattr(torch.ops.aten, _ATTENTION + kind) for kind in _ATTENTION_KINDS]
    own = {**dict.fromkeys(kernels, _attention_flops), torch.ops.aten._grouped_mm: _grouped_flops}
    return FlopCounterMode(display=False, custom_mapping=own).flop_registry


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Both products of attention: query [b, h, s, d], key [b, h, t, d], value [b, h, t, e]."""
    batch, heads, rows, inner = query
    columns, outer = key[-2], value[-1]
    return int(2 * batch * heads * rows * columns * (inner + outer))


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Each row with the matrix of its group: left [t, k] or [g, t, k], right [g, k, n]; or, for gradients of weights,
    left [k, t] and right [t, n], whose t is what is divided into groups."""
    return int(2 * prod(left) * right[-1])


@dataclass(slots=True)
class _Sum:
    flops: float = 0.0
    num_bytes: int = 0
    count: int = 0


class OperatorTally(TorchDispatchMode):
    """Adds up what the operators of one call give and cost, and follows its `inputs` (by place). `flops`: of all of
    them. `mixes_rows`: one of them does."""

    supports_higher_order_operators = True

    def __init__(self, inputs: Mapping[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.flops = 0.0
        self.mixes_rows = False
        self._takes_functions = False  # one of them does
        self._found: dict[str, _Sum] = {}  # by class
        self._places = frozenset(inputs or ())
        self._sources: dict[int, frozenset[int]] = {}  # by storage: the inputs that its content comes from
        self._is_lost = False  # something went through a tensor without a storage
        for place, tensor in (inputs or {}).items():  # several may lie in one
            self._sources[storage_of(tensor)] = self._sources.get(storage_of(tensor), _NOTHING) | {place}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and count its output."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _formulas().get(func._overloadpacket if is_plain(func) else func)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
        self.flops += flops
        self.mixes_rows = self.mixes_rows or _mixes_rows(func, args, kwargs)
        self._takes_functions = self._takes_functions or not is_plain(func)
        if self._sources:
            self._trace(func, args, kwargs, result)
        if _makes_something(func):
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            entry = self._found.setdefault(class_of(func, args, kwargs) or OTHER, _Sum())
            entry.flops += flops
            entry.num_bytes += sum(align(tensor.numel() * tensor.element_size(), PAGE) for tensor in tensors)
            entry.count += len(tensors)
        return result

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(tensor.layout is not torch.strided for tensor in (*given, *written)):
            self._is_lost = True
            return
        if is_plain(func) and func._schema.is_mutable and not written:
            written = given
        found = _NOTHING.union(*(self._sources.get(storage_of(tensor), _NOTHING) for tensor in given))
        for tensor in written:
            self._sources[storage_of(tensor)] = found

    def sources_of(self, output: torch.Tensor) -> frozenset[int]:
        """Places of the inputs that a tensor comes from, as far as can be told."""
        if self._is_lost or output.layout is not torch.strided:
            return self._places
        return self._sources.get(storage_of(output), _NOTHING)

    def classes(self) -> tuple[OperatorClass, ...]:
        """What was seen, the highest FLOPs per byte first. An operator that takes functions compiles itself when it
        runs, and cannot while others are recorded: beside it nothing is worth keeping."""
        found = [
            OperatorClass(name, entry.flops, entry.num_bytes, entry.count, name == OTHER or self._takes_functions)
            for name, entry in self._found.items()
        ]
        return tuple(sorted(found, key=lambda entry: -entry.benefit))


def storage_of(tensor: torch.Tensor) -> int:
    """Tells storages apart; fake ones, which have no address, too."""
    return int(tensor.untyped_storage()._cdata)


@cache
def _makes_something(func: Any) -> bool:
    """Whether an operator gives more than views of what it was given, or that itself."""
    return not is_plain(func) or any(given.alias_info is None for given in func._schema.returns)
