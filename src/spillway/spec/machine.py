"""Parts of machines and whole ones, measured or from the catalogue."""

from dataclasses import dataclass

from spillway.spec.hardware import HardwareSpec


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
        if any(not drive.endurance_bytes for drive in self.drives):
            return 0.0
        return sum(drive.endurance_bytes for drive in self.drives)
