"""Parts of machines and whole ones, measured or from the catalogue."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spillway.spec.hardware import HardwareSpec

# Stripes of a row that the fastest drive takes at most: speeds are told apart by an eighth.
_MOST_SHARES = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device. `peak_flops_per_s`: dense 16-bit products with fp32 accumulation; `block_share`: what of it a
    transformer block reaches. `memory_bytes_per_s`: of its own memory. Price in dollars, 0 unknown."""

    name: str
    memory_bytes: int
    peak_flops_per_s: float
    pcie_generation: int
    price: float
    source: str
    memory_bytes_per_s: float
    float32_flops_per_s: float  # of products in float32, which PyTorch does not round by itself (no TF32)
    block_share: float = 0.65


@dataclass(frozen=True, slots=True)
class Drive:
    """An NVMe drive. Bandwidths in bytes per second; `endurance_bytes` is what its maker warrants, 0 unknown."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    endurance_bytes: float
    price: float
    source: str


def stripe_shares(drives: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """How many stripes of a row each drive should take, by the time it needs to write and read a byte, from the bytes
    per second that it reads and writes. Drives of about the same speed get one each."""
    rates = [1 / (1 / read + 1 / write) for read, write in drives]
    shares = [max(1, round(_MOST_SHARES * rate / max(rates))) for rate in rates]
    if min(shares) >= _MOST_SHARES - 1:
        return (1,) * len(drives)
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


@dataclass(frozen=True, slots=True)
class Striped:
    """What several drives are as one store, which the slowest and the smallest of them bound. Units as of a `Drive`."""

    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    endurance_bytes: float  # 0 where that of one is unknown


def striped(drives: Sequence[Drive]) -> Striped:
    """At least one drive, each with the stripes that its speed asks for."""
    shares = stripe_shares([(drive.read_bytes_per_s, drive.write_bytes_per_s) for drive in drives])
    row = sum(shares)

    def bound(of: str) -> float:
        return min(getattr(drive, of) * row / share for drive, share in zip(drives, shares, strict=True))

    return Striped(
        int(bound("capacity_bytes")), bound("read_bytes_per_s"), bound("write_bytes_per_s"), bound("endurance_bytes")
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is made for: rates, and how much of each tier there is."""

    name: str
    hardware: HardwareSpec
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    peak_flops_per_s: float = 0.0  # of the device, by its maker; 0 unknown
    float32_share: float = 1.0  # of the device's rate and of its peak, for a model in float32
    drives: tuple[Drive, ...] = ()
    price: float = 0.0  # of what is priced in the catalogue

    @property
    def endurance_bytes(self) -> float:
        """What all drives together may be written; 0 where that of one is unknown."""
        return striped(self.drives).endurance_bytes if self.drives else 0.0
