"""CRC-32C without the native library: the same values, so that no damage goes unseen where it cannot load."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_LANES = 4096  # parts of the content that are advanced side by side
_SMALL = 64 * _LANES
_ALL_ONES = 0xFFFFFFFF

Words = npt.NDArray[np.uint32]


def crc32c(content: npt.NDArray[np.uint8], value: int = 0) -> int:
    """The checksum of bytes of which `value` is that of those before them."""
    state, done = value ^ _ALL_ONES, 0
    if len(content) >= _SMALL:
        each = len(content) // _LANES
        done = each * _LANES
        state = _fold(_advance(content[:done].reshape(_LANES, each)), each) ^ _shifted(state, done)
    table = _table().tolist()
    for byte in content[done:].tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ _ALL_ONES


@functools.cache
def _table() -> Words:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(_POLYNOMIAL), values >> 1)
    return values


def _advance(lanes: npt.NDArray[np.uint8]) -> Words:
    """The state after each row, from zero."""
    table, states = _table(), np.zeros(len(lanes), dtype=np.uint32)
    for column in np.ascontiguousarray(lanes.T):
        states = table[(states ^ column) & 0xFF] ^ (states >> 8)
    return states


def _fold(states: Words, each: int) -> int:
    """The state after all rows, one after another: a state is linear in the bits before it, so that of two parts is the
    first one's, moved over the length of the second, and the second one's."""
    length = each
    while len(states) > 1:
        states = _apply(_shift(length), states[0::2]) ^ states[1::2]
        length *= 2
    return int(states[0])


def _shifted(state: int, num_bytes: int) -> int:
    """A state moved over so many zero bytes."""
    moved = np.array([state], dtype=np.uint32)
    for bit in range(num_bytes.bit_length()):
        if num_bytes >> bit & 1:
            moved = _apply(_shift(1 << bit), moved)
    return int(moved[0])


@functools.cache
def _shift(num_bytes: int) -> Words:
    """What becomes of each bit of a state over so many zero bytes."""
    if num_bytes == 1:
        bits: Words = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return _table()[bits & 0xFF] ^ (bits >> 8)
    half = _shift(num_bytes // 2)
    whole = _apply(half, half)
    return _apply(_shift(1), whole) if num_bytes % 2 else whole


def _apply(shift: Words, states: Words) -> Words:
    """The sum, bit by bit, of what becomes of the bits that are set."""
    moved: Any = np.zeros_like(states)
    for bit in range(32):
        moved = moved ^ np.where(states >> np.uint32(bit) & 1, shift[bit], np.uint32(0))
    return moved
