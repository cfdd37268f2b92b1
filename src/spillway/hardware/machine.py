"""This machine as it is measured, and what is free of it."""

import platform
from pathlib import Path

import torch

from spillway.hardware.bandwidth import directories
from spillway.hardware.drives import endurance_of
from spillway.hardware.limits import free_host_bytes, process_bytes
from spillway.hardware.probe import forget, geometry_of, measure
from spillway.spec.hardware import HardwareSpec
from spillway.spec.machine import Drive, Machine
from spillway.spec.state import EXACT
from spillway.store.disk import Geometry, free_on

# A block large enough that its rate is that of larger ones.
_LARGE = {"cpu": (1024, 2048), "cuda": (8192, 4096)}
_ROOM_BYTES = 4 << 30


def this_machine(
    paths: tuple[Path, ...],
    dtype: torch.dtype = torch.bfloat16,
    refresh: bool = False,
    device: str = "auto",
) -> Machine:
    """Rates of this machine with these store paths, this device and for models of this dtype, and what is free now.
    `refresh`: measured anew, whatever is known."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(kind if device == "auto" else device)
    if refresh:
        forget(where)
    room = min(_ROOM_BYTES, free_host_bytes() // 2)
    there = int(torch.cuda.mem_get_info(where)[0]) // 2 if where.type == "cuda" else room
    with directories(paths):
        geometry = geometry_of(paths)
        hardware = measure(where, dtype, geometry, *_LARGE[where.type], EXACT, room, there)
        free = 0 if geometry is None else free_on(geometry)
        drives = () if geometry is None else _drives(geometry, hardware, free)
    host = free_host_bytes() + process_bytes()
    on_device = int(torch.cuda.mem_get_info(where)[0]) if where.type == "cuda" else host
    return Machine(platform.node() or "this machine", hardware, on_device, host, free, drives=drives)


def _drives(geometry: Geometry, hardware: HardwareSpec, free_bytes: int) -> tuple[Drive, ...]:
    """Those that the paths lie on, each with its share of what was measured of all."""
    places: dict[int, Path] = {}
    shares: dict[int, int] = {}
    for path, share in zip(geometry.directories, geometry.shares, strict=True):
        number = path.stat().st_dev
        places[number] = path
        shares[number] = shares.get(number, 0) + share
    row = sum(geometry.shares)
    return tuple(
        Drive(
            str(place),
            free_bytes * shares[number] // row,
            hardware.read_bytes_per_s * shares[number] / row,
            hardware.write_bytes_per_s * shares[number] / row,
            endurance_of(place),
            0.0,
            "measured here",
        )
        for number, place in places.items()
    )
