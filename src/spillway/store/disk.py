"""Preallocated files, one per store path, that together form one striped address space."""

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from spillway.native import DiskEngine, Transfer, TransferError
from spillway.spec.errors import DiskError, invariant
from spillway.spec.sizes import align, format_size

STRIPE = 1 << 20
PAGE = 4096
_DATA, _LOCK = "spillway.data", "spillway.lock"


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the striped address space."""

    offset: int
    num_bytes: int


class StripedDisk:
    """Equal shares on every path, 1 MiB at a time, opened with O_DIRECT where the file system allows it."""

    def __init__(self, paths: tuple[Path, ...], keep: bool) -> None:
        """Open or create the files; what they held stays only if `keep`, otherwise they read as zeros once reserved.
        Raises DiskError for a path that is read-only or in use."""
        self._paths = paths
        self._locks = [_lock(path) for path in paths]
        self._files = []
        self.direct = True
        self.num_bytes = 0
        for path in paths:
            fd, direct = _open(path / _DATA)
            if not keep:
                os.ftruncate(fd, 0)
            self._files.append(fd)
            self.direct = self.direct and direct

    def reserve(self, num_bytes: int) -> None:
        """Make sure the whole address space has room on the drives now, so that no write can fail for want of it.
        Raises DiskError with the bytes needed and free."""
        if num_bytes > self.num_bytes:
            share = align(-(-num_bytes // len(self._paths)), STRIPE)
            for path, fd in zip(self._paths, self._files, strict=True):
                _reserve(fd, path, share)
            self.num_bytes = share * len(self._paths)

    def read(self, engine: DiskEngine, extent: Extent, buffer: torch.Tensor) -> None:
        """Fill the host buffer; both are whole pages. Raises DiskError naming path and offset."""
        self._move(engine, [(extent, buffer)], is_write=False)

    def read_all(self, engine: DiskEngine, moves: list[tuple[Extent, torch.Tensor]]) -> None:
        """`read` for several extents in one batch."""
        self._move(engine, moves, is_write=False)

    def write_all(self, engine: DiskEngine, moves: list[tuple[Extent, torch.Tensor]]) -> None:
        """Write host buffers to extents in one batch; durable after `sync`."""
        self._move(engine, moves, is_write=True)

    def sync(self) -> None:
        """Return when everything written has reached the drives."""
        for path, fd in zip(self._paths, self._files, strict=True):
            try:
                os.fdatasync(fd)
            except OSError as error:
                raise DiskError(f"{path}: what was written could not be made durable ({error.strerror})") from error

    def close(self) -> None:
        """Close the files and release the locks."""
        for fd in (*self._files, *self._locks):
            os.close(fd)
        self._files, self._locks = [], []

    def _move(self, engine: DiskEngine, moves: list[tuple[Extent, torch.Tensor]], is_write: bool) -> None:
        transfers = [transfer for extent, buffer in moves for transfer in self._stripes(extent, buffer)]
        try:
            engine.run(transfers, is_write)
        except TransferError as error:
            failed = transfers[error.index]
            path = self._paths[self._files.index(failed.fd)]
            verb = "write to" if is_write else "read from"
            raise DiskError(
                f"cannot {verb} {path / _DATA} at offset {failed.offset} ({failed.num_bytes} bytes): {error.strerror}; "
                f"the last saved point is intact"
            ) from error

    def _stripes(self, extent: Extent, buffer: torch.Tensor) -> list[Transfer]:
        invariant(extent.num_bytes <= buffer.numel(), "the buffer is smaller than its extent")
        invariant(extent.offset % PAGE == 0 and extent.num_bytes % PAGE == 0, "extents are whole pages")
        address = buffer.data_ptr()
        if len(self._files) == 1:
            return [Transfer(self._files[0], address, extent.offset, extent.num_bytes)]
        transfers = []
        done = 0
        while done < extent.num_bytes:
            stripe, inside = divmod(extent.offset + done, STRIPE)
            row, column = divmod(stripe, len(self._files))
            size = min(STRIPE - inside, extent.num_bytes - done)
            transfers.append(Transfer(self._files[column], address + done, row * STRIPE + inside, size))
            done += size
        return transfers


def free_bytes(path: Path) -> int:
    """Bytes a store at `path` may use: what is free, and what its file has reserved already. The nearest existing
    parent is asked when the path does not exist yet."""
    at = path
    while not at.exists():
        at = at.parent
    stats = os.statvfs(at)
    data = path / _DATA
    return stats.f_bavail * stats.f_frsize + (data.stat().st_blocks * 512 if data.exists() else 0)


def _lock(path: Path) -> int:
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DiskError(f"the store path {path} cannot be written: {error.strerror}; choose another --store") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DiskError(f"the store {path} is in use by another run; wait for it or choose another --store") from error
    return fd


def _open(file: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(file, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise DiskError(f"{file} cannot be opened: {error.strerror}; choose another --store") from error
    return os.open(file, flags, 0o644), False


def _reserve(fd: int, path: Path, num_bytes: int) -> None:
    if num_bytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise DiskError(
            f"the store {path} needs {format_size(num_bytes)} and has {format_size(free_bytes(path))} free "
            f"({error.strerror}): free some, add a --store path, or use a smaller model"
        ) from error
