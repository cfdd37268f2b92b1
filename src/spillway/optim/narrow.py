"""Moments and masters kept in fewer bits, with PyTorch's operators: the same numbers as native/src/update_kernel.inc.

A block of 64 elements shares the exponent of its largest; an element is a small floating point number below it: a sign,
4 bits of exponent and 3 of mantissa for m, 5 and 3 for v. The error is at most an eighth of the value; what is below
2^-15 (for v 2^-31) of the block's largest becomes zero. Stochastic rounding makes the error zero on average.
"""

import torch

from spillway.spec.state import BLOCK

M_EXPONENTS, V_EXPONENTS = 15, 31
_LOWEST_SCALE = 40
_MASK = 0xFFFFFFFF


def hash_bits(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Random bits of elements [first, first + count), int64 in [0, 2^32)."""
    h = torch.arange(first, first + count, dtype=torch.int64, device=device) & _MASK
    h = ((h * 0x9E3779B1) & _MASK) ^ seed
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    return h ^ (h >> 13)


def again(h: torch.Tensor) -> torch.Tensor:
    """Further random bits."""
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def round_to_16(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """bfloat16, rounded stochastically."""
    bits = value.view(torch.int32).to(torch.int64) & _MASK
    upper = ((bits + (random & 0xFFFF)) & _MASK) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


def round_master_to_24(master: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights and the 8 bits (uint8) of the master below them."""
    bits = (master.view(torch.int32).to(torch.int64) + (random >> 24)) & _MASK
    upper = ((bits + 0x8000) & _MASK) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), ((bits >> 8) & 0xFF).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, exponents: int) -> torch.Tensor:
    """float32 of codes (uint8, whole blocks) and their scales (uint8, one a block)."""
    code = codes.view(-1, BLOCK).to(torch.int64)
    sign = torch.ones_like(code)
    if exponents == M_EXPONENTS:
        sign = 1 - 2 * (code >> 7)
        code = code & 0x7F
    scale = scales.to(torch.int64).clamp(min=_LOWEST_SCALE)[:, None]
    value = torch.where(code == 0, 0, (code << 20) + ((scale - exponents) << 23))
    return (_as_float(value) * sign).flatten()


def encode(value: torch.Tensor, random: torch.Tensor, exponents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of float32 values, in whole blocks; `random`: bits of each element."""
    bits = value.view(torch.int32).to(torch.int64).view(-1, BLOCK) & _MASK
    magnitude = bits & 0x7FFFFFFF
    # One more where rounding up would pass the largest code.
    scale = ((magnitude.amax(1, keepdim=True) + 0xFFFFF) >> 23).clamp(_LOWEST_SCALE, 254)
    rounded = magnitude + (random.view(-1, BLOCK) & 0xFFFFF) - ((scale - exponents) << 23)
    code = (rounded >> 20).clamp(min=0)
    if exponents == M_EXPONENTS:
        code = code | ((bits >> 24) & 0x80)
    return code.flatten().to(torch.uint8), scale.flatten().to(torch.uint8)


def _as_float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)
