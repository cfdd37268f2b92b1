"""Sizes as people write them."""

import math
import re

PAGE = 4096  # bytes: what O_DIRECT moves, and what buffers and parts of extents are multiples of

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "ki": 2**10,
    "kib": 2**10,
    "mi": 2**20,
    "mib": 2**20,
    "gi": 2**30,
    "gib": 2**30,
    "ti": 2**40,
    "tib": 2**40,
}
_LARGEST = 2**62
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes meant by '24GB', '24 GiB', '500M', '1.5tb' or a plain number.

    Raises ValueError, in one sentence, for anything else.
    """
    match = _SIZE.fullmatch(str(text))
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"'{text}' is not a size: write a number and a unit, for example 24GB, 24GiB or 500M")
    size = float(match.group(1)) * _UNITS[unit]
    if size > _LARGEST:
        raise ValueError(f"'{text}' is more than any machine has")
    return int(size)


def format_size(num_bytes: float) -> str:
    """A size for people, in decimal units: 1500000 -> '1.50 MB'."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def format_size_up(num_bytes: float) -> str:
    """As `format_size`, rounded up and with one per cent to spare: a size that is enough when it is typed in again."""
    return format_size(math.ceil(1.01 * num_bytes) + 10_000)


def typed_size_up(num_bytes: float) -> str:
    """The same as one would type it: '6.10GB'."""
    return format_size_up(num_bytes).replace(" ", "")


def format_flops(flops_per_s: float) -> str:
    """FLOP/s for people: '149.3 TFLOP/s', '8.6 GFLOP/s'."""
    if flops_per_s < 1e11:
        return f"{flops_per_s / 1e9:.1f} GFLOP/s"
    return f"{flops_per_s / 1e12:.1f} TFLOP/s"


def format_seconds(seconds: float) -> str:
    """A duration for people: '830 ms', '12.3 s', '4 min 05 s', '3 h 20 min'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def align(num_bytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def counted(number: int, noun: str) -> str:
    """As in "1 step" and "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
