"""Bytes a second over the links between memories, and of the drives."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import gcd, lcm
from pathlib import Path
from typing import NamedTuple

import torch

from spillway.hardware.timing import finish, kept_together, usual_seconds
from spillway.native import DiskEngine
from spillway.optim.update import sum_squares
from spillway.spec.errors import DiskError
from spillway.spec.machine import stripe_shares
from spillway.spec.sizes import format_size
from spillway.store.arena import Arena
from spillway.store.disk import Extent, Geometry

SCRATCH_BYTES = 128 << 20


class Links(NamedTuple):
    """Bytes a second, and the share of each way's rate that is left when both are used."""

    upload: float
    download: float
    reading: float  # a pass over host memory
    together: float


class Drives(NamedTuple):
    """Bytes a second, and the share of each way's rate that is left when both are used."""

    read: float
    write: float
    together: float


def link_rates(device: torch.device, num_bytes: int) -> Links:
    """Of copies of so many bytes between host memory, pinned where the device is a GPU, and the device."""
    found = _link_rates(device, num_bytes)
    give_back = getattr(torch.accelerator, "empty_host_cache", None)  # not in every version
    if give_back is not None and device.type == "cuda":
        give_back()  # pinned memory, which is kept for whoever wants some next
    return found


def _link_rates(device: torch.device, num_bytes: int) -> Links:
    host = torch.ones(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    return Links(
        num_bytes / usual_seconds(lambda: _copy(there, host)),
        num_bytes / usual_seconds(lambda: _copy(host, there)),
        num_bytes / usual_seconds(lambda: sum_squares(host.view(torch.float32), os.cpu_count() or 1)),
        1.0 if device.type == "cpu" else _link_together(host, there),
    )


def _link_together(host: torch.Tensor, there: torch.Tensor) -> float:
    """The share of its rate that each way over the link keeps while the other is used, too."""
    half = host.numel() // 2
    ways = [(there[:half], host[:half]), (host[half:], there[half:])]
    streams = [torch.cuda.Stream(there.device) for _ in ways]

    def both() -> None:
        for stream, (target, source) in zip(streams, ways, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        finish(there.device)

    alone = max(usual_seconds(lambda way=way: _copy(*way)) for way in ways)  # type: ignore[misc]
    return min(max(alone / usual_seconds(both), 0.5), 1.0)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    finish(target.device if target.is_cuda else source.device)


def drive_rates(paths: tuple[Path, ...], shares: tuple[int, ...], room_bytes: int = SCRATCH_BYTES) -> Drives:
    """Of all paths together, cut over them as a store is, with the engines that training uses. No more than
    `room_bytes` of host memory, and a quarter of what is free on a drive, are taken. Raises DiskError where a path
    cannot be written."""
    free = min(shutil.disk_usage(path).free for path in paths)
    num_bytes = whole_mebi(SCRATCH_BYTES, min(room_bytes, free // 4))
    engine, other = DiskEngine(), DiskEngine()
    buffer = Arena(num_bytes).buffer
    buffer.fill_(1)
    files: list[tuple[Path, int]] = []
    try:
        for path in paths:
            files.append(_open_scratch(path / "spillway.probe"))
        fds = [fd for _, fd in files]
        transfers = Geometry(tuple(map(str, paths)), shares).batch(fds, Extent(0, num_bytes), buffer.data_ptr())
        write = usual_seconds(lambda: engine.run(transfers, is_write=True))
        read = usual_seconds(lambda: engine.run(transfers, is_write=False))
        together = kept_together(
            lambda: engine.run(transfers, is_write=False), lambda: other.run(transfers, is_write=True), read, write
        )
    except OSError as error:
        where = ", ".join(str(path) for path in paths)
        room = f", {format_size(free)} are free; make room there or" if error.errno == errno.ENOSPC else ":"
        raise DiskError(
            f"the store under {where} cannot be written: {error.strerror}{room} choose another store"
        ) from error
    finally:
        engine.close()
        other.close()
        for file, fd in files:
            os.close(fd)
            file.unlink(missing_ok=True)
    return Drives(num_bytes / read, num_bytes / write, together)


def measure_shares(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """How many stripes of a row each path should take: as its drive is fast, and those on one drive equally many."""
    for path in paths:
        make_directory(path)
    drives = [path.stat().st_dev for path in paths]
    firsts = {drive: path for drive, path in zip(reversed(drives), reversed(paths), strict=True)}
    if len(firsts) == 1:
        return (1,) * len(paths)
    shares = stripe_shares([drive_rates((path,), (1,))[:2] for path in firsts.values()])
    parts = lcm(*Counter(drives).values())
    of_path = {drive: share * parts // drives.count(drive) for drive, share in zip(firsts, shares, strict=True)}
    smallest = gcd(*of_path.values())
    return tuple(of_path[drive] // smallest for drive in drives)


@contextmanager
def directories(paths: tuple[Path, ...]) -> Iterator[None]:
    """They are there meanwhile; what had to be made for it is removed again. Raises DiskError."""
    made = [path for given in paths for path in (given, *given.parents) if not path.exists()]
    try:
        for path in paths:
            make_directory(path)
        yield
    finally:
        for path in dict.fromkeys(made):
            with suppress(OSError):  # somebody has put something there
                path.rmdir()


def make_directory(path: Path) -> None:
    """Raises DiskError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"the store path {path} cannot be written: {error.strerror}; choose another store") from error


def _open_scratch(file: Path) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return file, os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        return file, os.open(file, flags, 0o600)


def whole_mebi(wanted: int, room: int) -> int:
    """As much as is wanted and there is room for, in whole mebi, and at least one."""
    return max(min(wanted, room) >> 20, 1) << 20
