"""The product of a head, a piece of the rows at a time: the gradient of its weight is added to what gathers it, and is
never a tensor of its own. For a vocabulary of 256k that tensor would take more than the logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def apply_head(head: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary] of rows [n, hidden]. `forward`: the head's own, which computes them where it is not that
    of nn.Linear, or casts."""
    is_plain = getattr(forward, "__func__", None) is nn.Linear.forward
    casts = torch.is_autocast_enabled(rows.device.type) or rows.dtype != head.weight.dtype
    if not is_plain or casts or not head.weight.requires_grad:
        return forward(rows)
    logits: torch.Tensor = _Product.apply(rows, head.weight)
    return logits if head.bias is None else logits + head.bias


class _Product(torch.autograd.Function):
    """rows @ weight.T. `weight` is a leaf."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.leaf = weight  # that which is saved may be another one in backward, of the same values
        return nn.functional.linear(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_rows, None
        if ctx.leaf.grad is None:
            return of_rows, grad.t() @ rows
        ctx.leaf.grad.addmm_(grad.t(), rows)
        return of_rows, None
