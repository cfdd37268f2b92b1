"""The arithmetic of one update, on any range of a unit."""

import ctypes
import math
from dataclasses import dataclass

import torch

from spillway import native

_TYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}


@dataclass(frozen=True, slots=True)
class Hyper:
    """The settings of one parameter group at one step; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True, slots=True)
class StateRange:
    """Equal 1-D ranges of a unit's arrays. `weight`: float32, or bfloat16 with `low` (int16) the lower master half."""

    weight: torch.Tensor
    low: torch.Tensor | None
    m: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor

    def narrow(self, start: int, length: int) -> "StateRange":
        """A part of the ranges."""
        low = None if self.low is None else self.low.narrow(0, start, length)
        return StateRange(
            self.weight.narrow(0, start, length),
            low,
            self.m.narrow(0, start, length),
            self.v.narrow(0, start, length),
            self.grad.narrow(0, start, length),
        )


def update_range(arrays: StateRange, hyper: Hyper, grad_scale: float, threads: int) -> None:
    """AdamW in place, with the order of operations of torch.optim.AdamW(fused=True) on CPU: the same bits."""
    if native.available() and arrays.weight.device.type == "cpu":
        native.adamw(_native_args(arrays, hyper, grad_scale), threads)
    else:
        _update_plain(arrays, hyper, grad_scale)


def sum_squares(grad: torch.Tensor, threads: int) -> float:
    """Sum of squares of a contiguous float32 or bfloat16 tensor in double precision."""
    if native.available() and grad.device.type == "cpu":
        return native.sum_squares(grad.data_ptr(), _TYPES[grad.dtype], grad.numel(), threads)
    return float(sum(part.double().square().sum().item() for part in grad.split(1 << 20)))


def clip_scale(norm: float, max_norm: float | None) -> float:
    """The factor torch.nn.utils.clip_grad_norm_ multiplies gradients by."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def join_master(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of bfloat16 weights and their lower halves (int16), every bit of it.

    The bfloat16 weight is the master rounded to nearest, ties away from zero: the upper half was carried into exactly
    where the lower half is at least 0x8000.
    """
    lower = low.to(torch.int32) & 0xFFFF
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return ((upper | lower) - ((lower & 0x8000) << 1)).view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights and int16 lower halves of a float32 tensor; `join_master` undoes it."""
    bits = master.view(torch.int32)
    upper = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, bits.to(torch.int16)


def _native_args(arrays: StateRange, hyper: Hyper, grad_scale: float) -> native.AdamWArgs:
    return native.AdamWArgs(
        weight=arrays.weight.data_ptr(),
        low=None if arrays.low is None else arrays.low.data_ptr(),
        m=arrays.m.data_ptr(),
        v=arrays.v.data_ptr(),
        grad=arrays.grad.data_ptr(),
        n=arrays.weight.numel(),
        weight_type=_TYPES[arrays.weight.dtype],
        grad_type=_TYPES[arrays.grad.dtype],
        grad_scale=grad_scale,
        decay=1 - hyper.lr * hyper.weight_decay,
        one_minus_beta1=1 - hyper.beta1,
        beta2=hyper.beta2,
        one_minus_beta2=1 - hyper.beta2,
        bias_correction2_sqrt=math.sqrt(1 - hyper.beta2**hyper.step),
        eps=hyper.eps,
        negative_step_size=-hyper.lr / (1 - hyper.beta1**hyper.step),
    )


def _update_plain(arrays: StateRange, hyper: Hyper, grad_scale: float, block: int = 1 << 20) -> None:
    """The same with PyTorch's operators, a block at a time so that no temporary is large."""
    for start in range(0, arrays.weight.numel(), block):
        part = arrays.narrow(start, min(block, arrays.weight.numel() - start))
        master = part.weight if part.low is None else join_master(part.weight, part.low)
        grad = part.grad.float().mul(ctypes.c_float(grad_scale).value)
        master.mul_(1 - hyper.lr * hyper.weight_decay)
        part.m.lerp_(grad, 1 - hyper.beta1)
        part.v.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
        correction = math.sqrt(1 - hyper.beta2**hyper.step)
        denominator = part.v.sqrt().div_(correction).add_(hyper.eps)
        master.addcdiv_(part.m, denominator, value=-hyper.lr / (1 - hyper.beta1**hyper.step))
        if part.low is not None:
            weight, low = split_master(master)
            part.weight.copy_(weight)
            part.low.copy_(low)
