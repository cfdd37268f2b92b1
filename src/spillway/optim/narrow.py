"""Moments and masters kept in fewer bits, with PyTorch's operators: the same numbers as native/src/update_blocks.inc.

A block of 64 elements shares a power of two, s, near its largest. An element x is kept as a small floating point
number: the bits of x / s + f, rounded to a mantissa of 3 bits, where f is 2^-15 for m and 2^-31 for v. That sum lies
between f and 2, so its sign, 3 bits and the 4 (for v 5) low bits of its exponent tell it; zero is f itself, and near it
codes are evenly spaced. The error is at most an eighth of |x| + f * s. Stochastic rounding makes it zero on average.
"""

from dataclasses import dataclass

import torch

from spillway.spec.state import BLOCK


@dataclass(frozen=True)
class Code:
    """What the sum of m or of v has in a code: bits from the 20th on, and what stands above them."""

    floor: int  # the bits of f
    mask: int
    room: int  # f beside numbers from 1 to 2, in units of their last place


M, V = Code(112 << 23, 0x7F, 256), Code(96 << 23, 0xFF, 0)
_LOWEST_SCALE, _HIGHEST_SCALE = 40, 253
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomBits:
    """Of each element, int64: as many bits as are rounded away."""

    m: torch.Tensor
    v: torch.Tensor
    master: torch.Tensor


def random_of_elements(first: int, count: int, seed: int, device: torch.device) -> RandomBits:
    """16 bits for moments and 8 for masters of elements [first, first + count)."""
    h = _hash(torch.arange(first, first + count, dtype=torch.int64, device=device), seed)
    further = (h * 0xC2B2AE35) & _MASK
    return RandomBits(h & 0xFFFF, h >> 16, (further ^ (further >> 16)) >> 24)


def random_of_blocks(first: int, count: int, seed: int, device: torch.device) -> RandomBits:
    """20 bits for moments and 8 for masters of whole blocks: a block's own bits, moved evenly over its elements."""
    blocks = torch.arange(first // BLOCK, (first + count) // BLOCK, dtype=torch.int64, device=device)
    byte = torch.arange(BLOCK, dtype=torch.int64, device=device)
    four, k = byte // 4, byte % 4
    by_byte = (_hash(blocks, seed) >> 12)[:, None] ^ ((k % 2 * 32 + k // 2 * 16 + four) << 14)
    m = _by_element(by_byte)
    v = _by_element(by_byte.view(-1, BLOCK // 4, 2, 2).flip(2).reshape(-1, BLOCK))  # bytes 2, 3, 0, 1 of four
    return RandomBits(m, v, m >> 12)


def round_to_16(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """bfloat16, rounded stochastically."""
    bits = value.view(torch.int32).to(torch.int64) & _MASK
    upper = ((bits + (random & 0xFFFF)) & _MASK) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


def round_master_to_24(master: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 weights and the 8 bits (uint8) of the master below them."""
    bits = (master.view(torch.int32).to(torch.int64) + random) & _MASK
    upper = ((bits + 0x8000) & _MASK) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), ((bits >> 8) & 0xFF).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, code: Code) -> torch.Tensor:
    """float32 of codes (uint8, whole blocks) and their scales (uint8, one a block)."""
    byte = codes.view(-1, BLOCK).to(torch.int64)
    scale = _as_float(scales.to(torch.int64).clamp(min=_LOWEST_SCALE) << 23)[:, None]
    size = (_as_float(code.floor + ((byte & code.mask) << 20)) - _as_float(torch.tensor(code.floor))) * scale
    return _by_element(torch.where(byte > code.mask, -size, size))


def least(scales: torch.Tensor, code: Code) -> torch.Tensor:
    """The smallest number beside zero that a block can keep, float32, one for each of `scales`."""
    return _as_float(scales.to(torch.int64).clamp(min=_LOWEST_SCALE) << 23) * (_as_float(torch.tensor(code.floor)) / 8)


def encode(value: torch.Tensor, random: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of float32 values, in whole blocks; `random`: 20 bits of each element."""
    blocks = value.view(-1, BLOCK)
    # One more where adding f and rounding up would pass the largest code.
    largest = blocks.abs().amax(1, keepdim=True).view(torch.int32).to(torch.int64)
    scale = ((largest + 0xFFFFF + code.room) >> 23).clamp(_LOWEST_SCALE, _HIGHEST_SCALE)
    floor = _as_float(torch.tensor(code.floor))
    sums = (blocks.abs() * _as_float((254 - scale) << 23) + floor).view(torch.int32).to(torch.int64)
    byte = ((sums + random.view(-1, BLOCK)) >> 20) & code.mask
    if code.mask < 0x80:
        byte = byte | (blocks.signbit().to(torch.int64) << 7)
    return _by_byte(byte).flatten().to(torch.uint8), scale.flatten().to(torch.uint8)


def _hash(number: torch.Tensor, seed: int) -> torch.Tensor:
    """32 random bits, in int64."""
    h = (((number & _MASK) * 0x9E3779B1) & _MASK) ^ seed
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    return h ^ (h >> 13)


# Byte 4 * i + k of a block is of element 8 * (i // 4) + i % 4 + 4 * (k % 2) + 32 * (k // 2).
def _by_element(blocks: torch.Tensor) -> torch.Tensor:
    """Elements one after another, [n]; from blocks in the order of their bytes."""
    # i // 4, i % 4, k // 2, k % 2 -> k // 2, i // 4, k % 2, i % 4
    return blocks.view(-1, 4, 4, 2, 2).permute(0, 3, 1, 4, 2).reshape(-1)


def _by_byte(elements: torch.Tensor) -> torch.Tensor:
    """Blocks in the order of their bytes, [blocks, 64]."""
    return elements.view(-1, 2, 4, 2, 4).permute(0, 2, 4, 1, 3).reshape(-1, BLOCK)


def _as_float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)
