"""The shape of grouped matrix products (experts of a mixture) on tensors without content: PyTorch tells it of bfloat16
alone, though the products run in float32 and float16, too."""

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_impls import register_op_impl


def _shape(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> tuple[int, ...]:
    """Of the product of groups of rows, of columns, or of what is summed over; `ends`: where each group ends."""
    if left.dim() == 2 and right.dim() == 2 and ends is not None:
        return ends.shape[0], left.shape[0], right.shape[1]
    if left.dim() == 3 and right.dim() == 3:
        return left.shape[0], left.shape[1], right.shape[2]
    return left.shape[-2], right.shape[-1]


def _grouped_product(
    mode: Any,
    func: Any,
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if left.dtype is torch.bfloat16:
        return NotImplemented
    with mode:
        return torch.empty(_shape(left, right, offs), dtype=out_dtype or left.dtype, device=left.device)


@cache
def tell_grouped_products() -> None:
    """Let all forwards on fake tensors know the shape."""
    product = getattr(torch.ops.aten, "_grouped_mm", None)
    if product is not None:
        register_op_impl(product.default)(_grouped_product)
