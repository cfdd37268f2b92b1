"""Device memory that one micro-batch of a call takes while it computes, temporaries included."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from math import prod
from operator import ge
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What kernels take and no operator shows, as measured around products of 16 MB to 524 MB on the CPU: some scratch, and,
# where it has no instructions for a dtype, gradients of weights in float32. A GPU's kernels read factors in place.
_SCRATCH_BYTES = 16 << 20
_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
_WIDENED = 2.0  # times the largest parameter


# In training, what a call takes may be told by one that is so many times as large.
SLACK = 1.25

# Tensors of so many bytes come from the system and go back to it (the most that glibc ever raises its threshold to);
# smaller ones from the heap, which keeps what lies between others.
_MAPPED_FROM = 32 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that a call takes while it computes, forward and backward: of all its tensors at the peak, and the most of
    those that come from a heap."""

    peak: int = 0
    heap: int = 0


Sizes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class MeasuredWorks:
    """What calls were measured to take, by their kind and the sizes of their inputs. A call takes no more than a larger
    one of its kind, which is taken for it where it is at most `slack` times as large: batches may be of any number of
    lengths, and each measurement holds up training."""

    _known: dict[Hashable, list[tuple[Sizes, Work]]] = field(default_factory=dict)

    def of(self, kind: Hashable, sizes: Sizes, slack: float, measure: Callable[[], Work]) -> Work:
        """Of a call; calls of a kind have inputs of the same number of dimensions."""
        known = self._known.setdefault(kind, [])
        near = [(_elements(other), work) for other, work in known if _stands_for(other, sizes, slack)]
        if near:
            return min(near, key=lambda found: found[0])[1]
        known.append((sizes, measure()))
        return known[-1][1]


def _stands_for(other: Sizes, sizes: Sizes, slack: float) -> bool:
    pairs = zip(other, sizes, strict=True)
    is_as_large = all(all(map(ge, large, small)) for large, small in pairs)
    return is_as_large and _elements(other) <= slack * _elements(sizes)


def _elements(sizes: Sizes) -> int:
    return sum(map(prod, sizes))


class MemoryMeter(TorchDispatchMode):
    """`peak`: most bytes alive at a time of tensors that operators inside made; views of `known` ones are none.
    `small_peak`: of those that come from a heap."""

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self.small_peak = 0
        self._live = 0
        self._small = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and watch what it gave."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._watched:
            return

        def gone(_: Any) -> None:
            self._watched.pop(key, None)
            self._count(-size)

        self._watched[key] = weakref.ref(storage, gone)
        self._count(size)

    def _count(self, size: int) -> None:
        self._live += size
        self._small += size if abs(size) < _MAPPED_FROM else 0
        self.peak, self.small_peak = max(self.peak, self._live), max(self.small_peak, self._small)


def measure_work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: list[torch.Tensor],
    device_kind: str,
) -> Work:
    """Of forward and backward, inputs and parameters (and what gathers their gradients) apart. On fake
    tensors nothing is computed. `device_kind`: of the device that will."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    trained = [param for param in params if param.requires_grad]
    for param in trained:
        param.grad = torch.empty_like(param)  # gradients are added to buffers that are counted elsewhere
    meter = MemoryMeter([*inputs, *params, *(param.grad for param in trained if param.grad is not None)])
    with torch.enable_grad(), meter:
        outputs = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        differentiable = [output for output in outputs if output.requires_grad]
        wanted = [*(leaf for leaf in inputs if leaf.requires_grad), *trained]
        if differentiable and wanted:
            grads = [torch.empty_like(output) for output in differentiable]
            torch.autograd.backward(differentiable, grads, inputs=wanted)
    if device_kind != "cpu":
        return Work(meter.peak)
    return Work(meter.peak + _hidden_bytes(params), meter.small_peak)


def _hidden_bytes(params: list[torch.Tensor]) -> int:
    largest = max(params, key=lambda param: param.numel() * param.element_size(), default=None)
    if largest is None or largest.dtype not in _INSTRUCTIONS:
        return _SCRATCH_BYTES
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if any(known.get(name) for name in _INSTRUCTIONS[largest.dtype]):
        return _SCRATCH_BYTES
    return _SCRATCH_BYTES + int(_WIDENED * largest.numel() * largest.element_size())
