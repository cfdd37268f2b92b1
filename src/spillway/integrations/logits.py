"""What a head gives in the place of logits, so that they are never whole in memory."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

_Step = Callable[[torch.Tensor], torch.Tensor]


class Owner(Protocol):
    """Who gave deferred logits."""

    def loss(
        self, logits: "DeferredLogits", targets: torch.Tensor, ignore_index: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        """Their cross-entropy ("mean" or "sum" over rows; `logits`: [rows, vocabulary], `targets`: [rows]), taken piece
        by piece."""

    def whole(self, logits: "DeferredLogits", wanted: str) -> torch.Tensor:
        """What they stand for, because the model does something with them that is not known of logits in pieces. Raises
        an error where that cannot be had."""


@dataclass(slots=True)
class ModelCall:
    """A forward of the model."""

    needs_loss_alone: bool  # it was given labels, and nobody wants its logits
    has_grad: bool
    num_items: Any = None  # what its loss is divided by, where it was told
    has_loss: bool = False  # that was taken of deferred logits
    is_over: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DeferredLogits:
    """The hidden states [..., width] of logits [..., vocabulary], and what the model does with their logits one by one
    (scales, soft caps, a bias per word) before it takes their cross-entropy. Rows may be taken and put into another
    shape. For anything else the model gets whole logits, where its owner has them."""

    hidden: torch.Tensor
    vocab_size: int
    owner: Owner
    autocast: Callable[[], Any]  # as it was where the head was called
    call: ModelCall  # that they are of
    steps: tuple[_Step, ...] = ()

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of these logits."""
        return apply_steps(self.steps, logits)

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.vocab_size))

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        """As Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def __mul__(self, factor: Any) -> Any:
        if not _is_number(factor):
            return self._whole("multiply") * factor
        return self._then(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if not _is_number(divisor):
            return self._whole("divide") / divisor
        return self._then(lambda logits: logits / divisor)

    def __add__(self, bias: Any) -> Any:
        """`bias`: of each word, as models of the BART kind keep one in a buffer."""
        is_of_words = isinstance(bias, torch.Tensor) and bias.numel() == self.vocab_size == bias.shape[-1]
        if not is_of_words or bias.requires_grad:
            return self._whole("add") + bias
        row = bias.reshape(-1)
        return self._then(lambda logits: logits + row)

    __radd__ = __add__

    def float(self) -> "DeferredLogits":
        """As Tensor.float."""
        return self._then(torch.Tensor.float)

    def contiguous(self) -> "DeferredLogits":
        """As Tensor.contiguous."""
        return self

    def view(self, *shape: Any) -> Any:
        """As Tensor.view, of the rows."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) < 2 or sizes[-1] != self.vocab_size:
            return self._whole("view").reshape(*shape)
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        """Some rows: [..., a:b, :]."""
        is_of_rows = isinstance(index, tuple) and len(index) == 3 and index[0] is ... and index[2] == slice(None)
        if not is_of_rows or not isinstance(index[1], slice):
            return self._whole("index")[index]
        return replace(self, hidden=self.hidden[index])

    def __getattr__(self, name: str) -> Any:
        """Of whole logits."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole(name), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tanh and len(args) == 1 and not kwargs and isinstance(args[0], cls):
            return args[0]._then(torch.tanh)
        given = _CROSS_ENTROPY.bind(*args, **kwargs).arguments if func is nn.functional.cross_entropy else {}
        if _is_known(given):
            ignored = given.get("ignore_index", -100), given.get("reduction", "mean"), given.get("label_smoothing", 0.0)
            logits: DeferredLogits = given["input"]
            return logits.owner.loss(logits, given["target"], *ignored)
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map_only(cls, lambda logits: logits._whole(name), (args, kwargs))
        return func(*args, **kwargs)

    def _then(self, step: _Step) -> "DeferredLogits":
        return replace(self, steps=(*self.steps, step))

    def _whole(self, wanted: str) -> torch.Tensor:
        return self.owner.whole(self, wanted)


def _of_whole(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self._whole(name.strip("_")), name)(*others)

    return operator


# Which Python looks for in the class alone.
for _name in (
    *("neg", "abs", "invert", "sub", "rsub", "rtruediv", "pow", "rpow", "mod", "floordiv", "matmul", "rmatmul"),
    *("iadd", "isub", "imul", "itruediv", "lt", "le", "gt", "ge", "len", "iter", "setitem"),
):
    setattr(DeferredLogits, f"__{_name}__", _of_whole(f"__{_name}__"))


def apply_steps(steps: tuple[_Step, ...], logits: torch.Tensor) -> torch.Tensor:
    """One after another."""
    for step in steps:
        logits = step(logits)
    return logits


_CROSS_ENTROPY = inspect.signature(nn.functional.cross_entropy)


def _is_known(given: dict[str, Any]) -> bool:
    """Whether it is a cross-entropy of rows of deferred logits and the numbers of words, all of one weight."""
    logits, targets = given.get("input"), given.get("target")
    if not isinstance(logits, DeferredLogits) or not isinstance(targets, torch.Tensor):
        return False
    is_of_rows = len(logits.shape) == 2 and targets.shape == logits.shape[:1] and not targets.is_floating_point()
    others = (given.get(name) for name in ("weight", "size_average", "reduce"))
    return is_of_rows and given.get("reduction", "mean") in ("mean", "sum") and all(value is None for value in others)


def _is_number(value: object) -> bool:
    return isinstance(value, (float, int))
