"""What a head gives in the place of logits, so that they are never whole in memory."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

_Step = Callable[[torch.Tensor], torch.Tensor]


class SumOfLosses(Protocol):
    """Takes the cross-entropy of deferred logits piece by piece."""

    def __call__(
        self, logits: "DeferredLogits", targets: torch.Tensor, ignore_index: int, label_smoothing: float
    ) -> torch.Tensor:
        """The sum over the rows of `logits` ([rows, vocabulary]; `targets`: [rows]), in float32 or wider."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeferredLogits:
    """The hidden states [..., width] of logits [..., vocabulary], and what the model does with their logits one by one
    (scales, soft caps, a bias per word) before it takes their cross-entropy. Rows may be taken and put into another
    shape. Anything else that the model tries is an error (TypeError, AttributeError), and its logits stay whole."""

    hidden: torch.Tensor
    vocab_size: int
    sum_of_losses: SumOfLosses
    steps: tuple[_Step, ...] = ()

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of these logits."""
        for step in self.steps:
            logits = step(logits)
        return logits

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

    def __mul__(self, factor: float) -> "DeferredLogits":
        _check_number(factor)
        return self._then(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "DeferredLogits":
        _check_number(divisor)
        return self._then(lambda logits: logits / divisor)

    def __add__(self, bias: torch.Tensor) -> "DeferredLogits":
        """`bias`: of each word, as models of the BART kind keep one in a buffer."""
        is_of_words = isinstance(bias, torch.Tensor) and bias.numel() == self.vocab_size == bias.shape[-1]
        if not is_of_words or bias.requires_grad:
            raise TypeError("logits are changed by something that is not a constant of each word")
        row = bias.reshape(-1)
        return self._then(lambda logits: logits + row)

    def float(self) -> "DeferredLogits":
        """As Tensor.float."""
        return self._then(torch.Tensor.float)

    def contiguous(self) -> "DeferredLogits":
        """As Tensor.contiguous."""
        return self

    def view(self, *shape: Any) -> "DeferredLogits":
        """As Tensor.view, of the rows."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) < 2 or sizes[-1] != self.vocab_size:
            raise TypeError(f"rows of {self.vocab_size} logits are put into the shape {sizes}")
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> "DeferredLogits":
        """Some rows: [..., a:b, :]."""
        is_of_rows = isinstance(index, tuple) and len(index) == 3 and index[0] is ... and index[2] == slice(None)
        if not is_of_rows or not isinstance(index[1], slice):
            raise TypeError(f"logits are taken by {index}")
        return replace(self, hidden=self.hidden[index])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs and isinstance(args[0], cls):
            return args[0]._then(torch.tanh)
        if func is nn.functional.cross_entropy:
            return _cross_entropy(**_CROSS_ENTROPY.bind(*args, **(kwargs or {})).arguments)
        raise TypeError(f"{func} is not known of logits in pieces")

    def _then(self, step: _Step) -> "DeferredLogits":
        return replace(self, steps=(*self.steps, step))


_CROSS_ENTROPY = inspect.signature(nn.functional.cross_entropy)


def _cross_entropy(
    input: DeferredLogits,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    """That of torch.nn.functional, for rows of logits and the numbers of words, all of one weight."""
    is_of_rows = isinstance(input, DeferredLogits) and len(input.shape) == 2 and target.shape == input.shape[:1]
    if not is_of_rows or target.is_floating_point() or reduction not in ("mean", "sum"):
        raise TypeError("this kind of cross-entropy is not known of logits in pieces")
    if any(value is not None for value in others.values()):
        raise TypeError(f"the cross-entropy of logits in pieces has no {', '.join(others)}")
    total = input.sum_of_losses(input, target, ignore_index, label_smoothing)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _check_number(value: object) -> None:
    if not isinstance(value, (float, int)):
        raise TypeError(f"logits are scaled by a {type(value).__name__}")
