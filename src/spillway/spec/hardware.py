"""What a machine is, as far as the plan cares."""

import math
from dataclasses import dataclass

# Of what is free, where the user says nothing; of the host, where more is asked for than is free, by more than it
# moves from moment to moment.
HOST_SHARE = 0.9
HOST_MOST = 0.95
_ABOUT = 1.05
DEVICE_SHARE = 0.95
# Workspaces of matrix products, one for each thread that computes, kernels that are loaded when first used, and what an
# update there takes besides its states (144 MiB).
DEVICE_RESERVE = 400 << 20
# That an exact AdamW reads and writes of a parameter: gradient, both halves of the weight, m and v.
UPDATE_BYTES = 26


def host_bytes(free: int, given: int | None) -> int:
    """What a plan may take of the host, of which so much is free or this process's, and so much was given."""
    if given is None:
        return int(HOST_SHARE * free)
    return int(HOST_MOST * free) if asks_too_much(free, given) else min(given, free)


def asks_too_much(free: int, given: int) -> bool:
    """Whether more was given of the host than there is."""
    return given > _ABOUT * free


def device_bytes(free: int, given: int | None) -> int:
    """What a plan may lay out on a GPU of which so much is free, and so much was given; below 0 where that is less than
    what is taken beside it."""
    usable = int(DEVICE_SHARE * free)
    return min(usable if given is None else given, usable) - DEVICE_RESERVE


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """Measured or catalogued rates of one machine. Rates are per second; bandwidths in bytes per second."""

    device: str  # "cpu" or "cuda"
    device_flops_per_s: float  # of a transformer block in the compute dtype
    upload_bytes_per_s: float
    download_bytes_per_s: float
    read_bytes_per_s: float  # all store paths together
    write_bytes_per_s: float
    update_params_per_s: float  # AdamW with every core
    host_bytes_per_s: float  # a pass of plain reading, such as the gradient norm
    # Lanes that share a resource slow each other down: on the CPU as device, compute, update and copies share the
    # cores: two of them keep `cores_together` of their own rates (0.5 if none is lost; caches and memory are shared,
    # too). Reads and writes share the drives: the share of its own rate that each keeps while the other runs, from 0.5
    # (one at a time, as the papers have it; less where they disturb each other) to 1 (both at once).
    cores_shared: bool = False
    cores_together: float = 0.5
    disk_together: float = 0.5
    device_update_params_per_s: float = 1e10  # AdamW on the device, of what lies there
    checksum_params_per_s: float = math.inf  # what an update adds for states on their way to the drives, every core
    link_together: float = 1.0  # of the rate of each way over the link, while both are used


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of each tier may be used. On the CPU as device, host_bytes covers the device tier too."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    process_bytes: int  # host memory the process takes before any of ours: interpreter, libraries, data
