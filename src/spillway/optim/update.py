"""The arithmetic of one update, on any range of a unit."""

import ctypes
import math
from dataclasses import dataclass

import torch

from spillway import native
from spillway.optim import narrow
from spillway.spec.errors import required
from spillway.spec.sizes import PAGE, align
from spillway.spec.state import BLOCK, StateFormat

_TYPES = {
    torch.float32: native.FLOAT32,
    torch.bfloat16: native.BFLOAT16,
    torch.float16: native.FLOAT16,
    torch.uint8: native.EIGHT_BIT,
}
# Elements at a time with PyTorch's operators: on a GPU each is a launch of a kernel, some 24 to a block of exact states
# and 140 to one in 8 bits, whose temporaries take 36 and 89 bytes an element.
_BLOCKS = {"cpu": 1 << 20, "cuda": 1 << 22}
_NARROW_BLOCK = 1 << 20
_RULES = {"adamw": native.ADAMW, "lion": native.LION, "sgd": native.SGD}


@dataclass(frozen=True, slots=True)
class Hyper:
    """The settings of one parameter group at one step. `step`: the updates of what is updated, this one included; for a
    unit that some steps do not reach fewer than the model's. For SGD beta1 is the momentum."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def seed(self) -> int:
        """Of this step's stochastic rounding."""
        return (self.step * 0x9E3779B97F4A7C15 >> 16) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class StateRange:
    """Equal 1-D ranges of a unit's arrays, from element `first` on. `weight`: float32; bfloat16 with `low` (int16,
    or uint8) the lower part of the master; or float16 with `low` (float32) the master itself. Moments float32,
    bfloat16, or uint8 codes with two `scales` a block."""

    form: StateFormat
    first: int
    weight: torch.Tensor
    low: torch.Tensor | None
    m: torch.Tensor | None
    v: torch.Tensor | None
    scales: torch.Tensor | None
    grad: torch.Tensor

    def stored(self) -> list[torch.Tensor]:
        """All that an update changes."""
        return [array for array in (self.weight, self.low, self.m, self.v, self.scales) if array is not None]

    def narrow(self, start: int, length: int) -> "StateRange":
        """A part of the ranges; whole blocks where moments have 8 bits."""

        def cut(array: torch.Tensor | None, entries: int = 1, block: int = 1) -> torch.Tensor | None:
            return None if array is None else array.narrow(0, start // block * entries, -(-length // block) * entries)

        return StateRange(
            self.form,
            self.first + start,
            self.weight.narrow(0, start, length),
            cut(self.low),
            cut(self.m),
            cut(self.v),
            cut(self.scales, 2, BLOCK),
            self.grad.narrow(0, start, length),
        )


def laid_in(arrays: StateRange, slot: torch.Tensor) -> StateRange:
    """The same ranges as they lie in a uint8 buffer, one after another at whole pages."""
    at = 0

    def place(array: torch.Tensor) -> torch.Tensor:
        nonlocal at
        size = array.numel() * array.itemsize
        start, at = at, align(at + size, PAGE)
        return slot[start : start + size].view(array.dtype)

    def maybe(array: torch.Tensor | None) -> torch.Tensor | None:
        return None if array is None else place(array)

    weight, grad = place(arrays.weight), place(arrays.grad)
    low, m, v, scales = (maybe(array) for array in (arrays.low, arrays.m, arrays.v, arrays.scales))
    return StateRange(arrays.form, arrays.first, weight, low, m, v, scales, grad)


def update_range(arrays: StateRange, hyper: Hyper, grad_scale: float, threads: int) -> None:
    """One step in place. AdamW with float32 moments has the order of operations of torch.optim.AdamW(fused=True) on
    CPU: the same bits."""
    if native.available() and arrays.weight.device.type == "cpu":
        native.update(_native_args(arrays, hyper, grad_scale), threads)
    else:
        _update_plain(arrays, hyper, grad_scale)


def sum_squares(grad: torch.Tensor, threads: int) -> float:
    """Sum of squares of a contiguous float32, bfloat16 or float16 tensor in double precision."""
    if native.available() and grad.device.type == "cpu":
        return native.sum_squares(grad.data_ptr(), _TYPES[grad.dtype], grad.numel(), threads)
    total = torch.zeros((), dtype=torch.float64, device=grad.device)
    for part in grad.split(_BLOCKS[grad.device.type]):
        total += part.double().square().sum()
    return float(total.item())  # the only one that waits for a device


def join_master(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of 16-bit weights: with bfloat16 ones is given what it has below them (int16, or its upper 8 bits
    as uint8), with float16 ones it itself.

    The bfloat16 weight is the master rounded to nearest, ties away from zero: the upper half was carried into exactly
    where the lower half is at least 0x8000.
    """
    if low.dtype is torch.float32:
        return low
    lower = low.to(torch.int32) << 8 if low.dtype is torch.uint8 else low.to(torch.int32) & 0xFFFF
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return ((upper | lower) - ((lower & 0x8000) << 1)).view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights and int16 lower halves of a float32 tensor; `join_master` undoes it."""
    bits = master.view(torch.int32)
    upper = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, bits.to(torch.int16)


def _native_args(arrays: StateRange, hyper: Hyper, grad_scale: float) -> native.UpdateArgs:
    form, moment = arrays.form, arrays.m
    adamw = form.rule == "adamw"
    return native.UpdateArgs(
        weight=arrays.weight.data_ptr(),
        low=_address(arrays.low),
        m=_address(arrays.m),
        v=_address(arrays.v),
        scales=_address(arrays.scales),
        grad=arrays.grad.data_ptr(),
        n=arrays.weight.numel(),
        first=arrays.first,
        rule=_RULES[form.rule],
        weight_type=_TYPES[arrays.weight.dtype],
        low_bits=form.low_bits,
        moment_type=native.FLOAT32 if moment is None else _TYPES[moment.dtype],
        grad_type=_TYPES[arrays.grad.dtype],
        seed=hyper.seed,
        grad_scale=grad_scale,
        decay=1 - hyper.lr * hyper.weight_decay,
        l2=hyper.weight_decay,
        beta1=hyper.beta1,
        one_minus_beta1=1 - hyper.beta1,
        beta2=hyper.beta2,
        one_minus_beta2=1 - hyper.beta2,
        bias_correction2_sqrt=math.sqrt(1 - hyper.beta2**hyper.step),
        eps=hyper.eps,
        negative_step_size=-hyper.lr / (1 - hyper.beta1**hyper.step) if adamw else -hyper.lr,
    )


def _address(array: torch.Tensor | None) -> int | None:
    return None if array is None else array.data_ptr()


def _update_plain(arrays: StateRange, hyper: Hyper, grad_scale: float) -> None:
    """The same with PyTorch's operators, a block at a time so that no temporary is large."""
    block = _BLOCKS[arrays.weight.device.type] if _is_exact(arrays.form) else _NARROW_BLOCK
    for start in range(0, arrays.weight.numel(), block):
        _update_block(arrays.narrow(start, min(block, arrays.weight.numel() - start)), hyper, grad_scale)


def _update_block(part: StateRange, hyper: Hyper, grad_scale: float) -> None:
    random = None if _is_exact(part.form) else _random_bits(part, hyper.seed)
    master = part.weight if part.low is None else join_master(part.weight, part.low)
    grad = part.grad.float().mul(ctypes.c_float(grad_scale).value)
    m = _load(part, part.m, 0, narrow.M)
    if part.form.rule == "adamw":
        v = _load(part, part.v, 1, narrow.V)
        master.mul_(1 - hyper.lr * hyper.weight_decay)
        m.lerp_(grad, 1 - hyper.beta1)
        v.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
        correction = math.sqrt(1 - hyper.beta2**hyper.step)
        denominator = _divided_by(part, v, hyper.beta2).sqrt().div_(correction).add_(hyper.eps)
        master.addcdiv_(m, denominator, value=-hyper.lr / (1 - hyper.beta1**hyper.step))
        if random is not None:
            _store(part, part.v, v, 1, narrow.V, random.v)
    elif part.form.rule == "lion":
        direction = (m * hyper.beta1).add_(grad * (1 - hyper.beta1)).sign_()
        m.mul_(hyper.beta2).add_(grad * (1 - hyper.beta2))
        master.mul_(1 - hyper.lr * hyper.weight_decay).add_(direction, alpha=-hyper.lr)
    else:
        m.mul_(hyper.beta1).add_(grad.add_(master, alpha=hyper.weight_decay))
        master.add_(m, alpha=-hyper.lr)
    if random is not None:
        _store(part, part.m, m, 0, narrow.M, random.m)
    if part.low is None:
        return
    if part.low.dtype is torch.float32:
        part.weight.copy_(master)
        return
    if part.low.dtype is torch.uint8 and random is not None:
        weight, low = narrow.round_master_to_24(master, random.master)
    else:
        weight, low = split_master(master)
    part.weight.copy_(weight)
    part.low.copy_(low)


def _is_exact(form: StateFormat) -> bool:
    return form.moments == "float32" and form.low_bits == 16


def _random_bits(part: StateRange, seed: int) -> narrow.RandomBits:
    make = narrow.random_of_blocks if part.form.moments == "8bit" else narrow.random_of_elements
    return make(part.first, part.weight.numel(), seed, part.weight.device)


def _load(part: StateRange, array: torch.Tensor | None, index: int, code: narrow.Code) -> torch.Tensor:
    """A moment as float32; in place where it is."""
    array = required(array, f"{part.form.rule} has no such moment")
    if array.dtype is torch.uint8 and part.scales is not None:
        return narrow.decode(array, part.scales[index::2], code)
    return array if array.dtype is torch.float32 else array.float()


def _divided_by(part: StateRange, v: torch.Tensor, beta2: float) -> torch.Tensor:
    """The new v as AdamW divides by its root. What a block could only keep as zero is taken as the least that it keeps:
    m is kept more finely, and what is left of it would be divided by next to nothing."""
    if part.scales is None:
        return v
    least = narrow.least(part.scales[1::2], narrow.V) * beta2
    return torch.maximum(v.view(-1, BLOCK), least[:, None]).flatten()


def _store(
    part: StateRange,
    array: torch.Tensor | None,
    value: torch.Tensor,
    index: int,
    code: narrow.Code,
    random: torch.Tensor,
) -> None:
    """A moment that is not kept as float32."""
    if array is None or array.dtype is torch.float32:
        return
    if array.dtype is torch.uint8 and part.scales is not None:
        codes, scales = narrow.encode(value, random, code)
        array.copy_(codes)
        part.scales[index::2] = scales
    else:
        array.copy_(narrow.round_to_16(value, random))
