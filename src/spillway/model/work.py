"""Device memory that one micro-batch of a call takes while it computes, temporaries included."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Kernels copy factors into layouts of their own, which no operator shows: of the largest parameter, as measured with a
# 1.1B-parameter model under a hard limit (benchmarks/memory.py).
_HIDDEN_COPIES = 1.5


class MemoryMeter(TorchDispatchMode):
    """`peak`: most bytes alive at a time of tensors that operators inside made; views of `known` ones are none."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
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
            self._live -= size

        self._watched[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)


def work_bytes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], params: list[nn.Parameter]
) -> int:
    """Peak of forward and backward, inputs and parameters (and what gathers their gradients) apart. On fake tensors:
    nothing is computed."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    trained = [param for param in params if param.requires_grad]
    hooks = [param.register_post_accumulate_grad_hook(_let_go) for param in trained]
    meter = MemoryMeter([*inputs, *params])
    try:
        with torch.enable_grad(), meter:
            outputs = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            differentiable = [output for output in outputs if output.requires_grad]
            wanted = [*(leaf for leaf in inputs if leaf.requires_grad), *trained]
            if differentiable and wanted:
                grads = [torch.empty_like(output) for output in differentiable]
                torch.autograd.backward(differentiable, grads, inputs=wanted)
    finally:
        for hook in hooks:
            hook.remove()
    largest = max((param.numel() * param.element_size() for param in params), default=0)
    return meter.peak + int(_HIDDEN_COPIES * largest)


def _let_go(param: torch.Tensor) -> None:
    """Its gradient is added to a buffer that is counted elsewhere."""
    param.grad = None
