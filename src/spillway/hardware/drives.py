"""Which known drive a directory lies on."""

import os
import re
from pathlib import Path

from spillway.hardware.catalogue import DRIVES

_SECTOR_BYTES = 512


def endurance_of(path: Path, block_devices: Path = Path("/sys/dev/block")) -> float:
    """Bytes that the maker of the path's drive warrants to be written; 0 where the drive is not in the catalogue, or
    is gone. Within a series the figure grows with the capacity."""
    try:
        number = path.stat().st_dev
    except OSError:
        return 0.0
    found = (block_devices / f"{os.major(number)}:{os.minor(number)}").resolve()
    disk = found.parent if (found / "partition").exists() else found
    try:
        model = (disk / "device" / "model").read_text()
        capacity = int((disk / "size").read_text()) * _SECTOR_BYTES
    except (OSError, ValueError):
        return 0.0
    plain = re.sub(r"[^a-z0-9]", "", model.lower())
    known = next((drive for name, drive in DRIVES.items() if name in plain), None)
    return known.endurance_bytes * capacity / known.capacity_bytes if known is not None else 0.0
