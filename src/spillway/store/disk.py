"""Preallocated files, one per store path, that together form one striped address space."""

import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from spillway.durable import sync_directory, write_whole
from spillway.native import TRANSFER, Batch, DiskEngine, Transfer, TransferError, batch_of
from spillway.spec.errors import DamageError, DiskError, UsageError, invariant
from spillway.spec.sizes import PAGE, format_size

STRIPE = 1 << 20
_LOCK = "spillway.lock"
_OWNER = "spillway.owner"  # names the first path of the store that a path belongs to


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the striped address space."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the address space is cut over the paths: rows of sum(shares) stripes, of which each path takes its share, so
    that a faster drive holds more. `generation` counts how often a store has moved to other drives."""

    paths: tuple[str, ...]
    shares: tuple[int, ...]
    generation: int = 0

    @property
    def file_name(self) -> str:
        """Of the data under every path."""
        return "spillway.data" if self.generation == 0 else f"spillway.data.{self.generation}"

    @property
    def directories(self) -> tuple[Path, ...]:
        """The store paths."""
        return tuple(map(Path, self.paths))

    def files(self) -> tuple[Path, ...]:
        """The data file under every path."""
        return tuple(path / self.file_name for path in self.directories)

    def batch(self, fds: Sequence[int], extent: Extent, address: int) -> Batch:
        """The transfers between an extent and memory, in the order of the address space. `fds`: of every path's
        file."""
        if len(fds) == 1:
            return batch_of([Transfer(fds[0], address, extent.offset, extent.num_bytes)])
        first, last = (
            at // (STRIPE * sum(self.shares)) for at in (extent.offset, extent.offset + extent.num_bytes - 1)
        )
        rows = np.arange(first, last + 1)[:, None]
        sizes = STRIPE * np.array(self.shares)
        starts = rows * sizes.sum() + np.cumsum(sizes) - sizes
        begins = np.maximum(starts, extent.offset)
        ends = np.minimum(starts + sizes, extent.offset + extent.num_bytes)
        there = ends > begins
        batch = np.zeros(int(there.sum()), TRANSFER)
        batch["fd"] = np.broadcast_to(np.array(fds), there.shape)[there]
        batch["address"] = (address + begins - extent.offset)[there]
        batch["offset"] = (rows * sizes + begins - starts)[there]
        batch["num_bytes"] = (ends - begins)[there]
        return batch

    def where(self, offset: int) -> tuple[Path, int]:
        """File and offset in it of a byte of the address space."""
        (found,) = self.batch(range(len(self.shares)), Extent(offset, 1), 0)
        return self.files()[int(found["fd"])], int(found["offset"])


class StripedDisk:
    """One address space over several files, opened with O_DIRECT where the file system allows it."""

    def __init__(
        self,
        geometry: Geometry,
        keep: bool,
        locked: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
        may_write: bool = True,
    ) -> None:
        """Open or create the files; what they held stays only if `keep`, otherwise they read as zeros once reserved.
        Paths in `locked` are held by the caller already. `check` is called when all are, before anything is changed.
        Without `may_write` the paths may be read-only. Raises DiskError for one that is so otherwise, that is in use,
        or, with `keep`, has lost its file."""
        flags = os.O_RDWR | os.O_CREAT if may_write else os.O_RDONLY
        self.geometry = geometry
        self._paths = geometry.directories
        if keep:
            for file in geometry.files():
                if not file.exists():
                    raise DiskError(f"{file}, a part of the saved run, is missing: bring its drive back")
        self._locks: list[int] = []
        self._files: list[int] = []
        self.direct = True
        self.num_bytes = 0
        self._written: dict[int, int] = {}
        self._counting = threading.Lock()
        self._lost: DiskError | None = None  # a `sync` that failed: the kernel tells of it only once
        self._syncing = threading.Lock()
        _opened.add(self)
        try:
            for path in self._paths:
                if path.resolve() not in {Path(held).resolve() for held in locked}:
                    self._locks.append(_lock(path, flags))
            check()
            for file in geometry.files():
                fd, direct = _open(file, flags)
                self._files.append(fd)
                self._written[fd] = 0
                self.direct = self.direct and direct
                if not keep:
                    write_whole(file.parent / _OWNER, str(self._paths[0].resolve()))
                    os.ftruncate(fd, 0)
                    sync_directory(file.parent)
                    sync_directory(file.parent.parent)
        except BaseException:
            self.close()
            raise

    def drop_others(self) -> None:
        """Remove the data of stores that lay under these paths before: a move that was killed leaves one. Raises
        OSError."""
        for path in self._paths:
            for file in path.glob("spillway.data*"):
                if file.name != self.geometry.file_name and file.is_file():
                    file.unlink(missing_ok=True)

    def reserve(self, num_bytes: int) -> None:
        """Make sure the whole address space has room on the drives now, so that no write can fail for want of it.
        Raises DiskError with the bytes needed and free."""
        if num_bytes > self.num_bytes:
            row = STRIPE * sum(self.geometry.shares)
            rows = -(-num_bytes // row)
            for path, share in zip(self._paths, self.geometry.shares, strict=True):
                _reserve(path / self.geometry.file_name, rows * share * STRIPE)
            self.num_bytes = rows * row

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
        """Return when everything written has reached the drives. Raises DiskError where it has not, also where a file
        was removed or its drive taken away: what is written then would be found by nobody. Once it has not, it never
        has: nobody knows what was lost."""
        with self._syncing:
            if self._lost is not None:
                raise self._lost
            try:
                self._sync()
            except DiskError as error:
                self._lost = error
                raise

    def _sync(self) -> None:
        for path, fd in zip(self._paths, self._files, strict=True):
            file = path / self.geometry.file_name
            try:
                os.fdatasync(fd)
                found = os.stat(file)
            except FileNotFoundError as error:
                raise DiskError(f"{file} was removed while a run used it: bring it back, or start anew") from error
            except OSError as error:
                raise DiskError(f"{path}: what was written could not be made durable ({error.strerror})") from error
            if (found.st_dev, found.st_ino) != (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
                raise DiskError(f"{file} was replaced by another file while a run used it: start the run anew")

    @property
    def written_bytes(self) -> dict[str, int]:
        """Bytes written since it was opened, per path."""
        return {str(path): self._written[fd] for path, fd in zip(self._paths, self._files, strict=True)}

    def _count(self, batch: Batch) -> None:
        with self._counting:
            for fd in self._files:
                self._written[fd] += int(batch["num_bytes"][batch["fd"] == fd].sum())

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors, for an engine to register."""
        return tuple(self._files)

    def close(self) -> None:
        """Close the files and release the locks."""
        for lock in self._locks:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also that of processes which were forked and have the file open, too
        self._let_go()

    def _let_go(self) -> None:
        held = (*self._files, *self._locks)
        self._files, self._locks = [], []  # first: a number that was closed may soon be another file's
        for fd in held:
            os.close(fd)

    def _move(self, engine: DiskEngine, moves: list[tuple[Extent, torch.Tensor]], is_write: bool) -> None:
        for extent, buffer in moves:
            invariant(extent.num_bytes <= buffer.numel(), "the buffer is smaller than its extent")
            invariant(extent.offset % PAGE == 0 and extent.num_bytes % PAGE == 0, "extents are whole pages")
        if not moves:
            return
        parts = [self.geometry.batch(self._files, extent, buffer.data_ptr()) for extent, buffer in moves]
        batch = np.concatenate(parts)
        try:
            engine.run(batch, is_write)
            if is_write:
                self._count(batch)
        except TransferError as error:
            failed = batch[error.index]
            file = self.geometry.files()[self._files.index(int(failed["fd"]))]
            verb = "write to" if is_write else "read from"
            raise DiskError(
                f"cannot {verb} {file} at offset {failed['offset']} ({failed['num_bytes']} bytes): {error.strerror}; "
                f"saved points are intact"
            ) from error


# Workers that are forked (of a DataLoader) would keep files, and locks of a run that was killed, as long as they live.
_opened: "weakref.WeakSet[StripedDisk]" = weakref.WeakSet()


def _let_go_of_all() -> None:
    for disk in list(_opened):
        disk._let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def check_lengths(geometry: Geometry, num_bytes: int) -> None:
    """Raise DamageError naming a file that is too short to hold its part of the first `num_bytes` of the address space,
    DiskError for one that is gone."""
    rows, rest = divmod(num_bytes, STRIPE * sum(geometry.shares))
    for file, share in zip(geometry.files(), geometry.shares, strict=True):
        need = rows * share * STRIPE + min(rest, share * STRIPE)
        rest = max(rest - share * STRIPE, 0)
        if not file.exists():
            raise DiskError(f"{file}, a part of the saved run, is missing: bring its drive back")
        have = file.stat().st_size
        if have < need:
            raise DamageError(
                f"{file} ends at byte {have} and the saved run needs {need}: it was cut short; restore the file"
            )


def free_bytes(path: Path) -> int:
    """Bytes a store at `path` may use: what is free, and what its file has reserved already. The nearest existing
    parent is asked when the path does not exist yet."""
    return available(path) + _reserved(path)


def existing(path: Path) -> Path:
    """The path, or the nearest parent that is there."""
    path = path.expanduser().resolve()
    while not path.exists():
        path = path.parent
    return path


def available(path: Path) -> int:
    """Bytes that are free on the file system of a path."""
    stats = os.statvfs(existing(path))
    return stats.f_bavail * stats.f_frsize


def _reserved(path: Path) -> int:
    return sum(data.stat().st_blocks * 512 for data in path.glob("spillway.data*"))


def refuse_foreign(paths: tuple[Path, ...]) -> None:
    """Raise UsageError where a path that is about to be emptied holds a part of another store's saved run."""
    for path in paths:
        try:
            owner = Path((path / _OWNER).read_text())
        except OSError:
            continue
        if not any(path.glob("spillway.data*")):
            continue
        if any(owner.glob("step-*.json")):
            raise UsageError(f"{path} holds a part of the run that is saved in {owner}: choose another store path")
        if not any(owner.glob("spillway.data*")):
            raise UsageError(
                f"{path} holds a part of a store that begins in {owner}, where there is nothing: bring its drive back, "
                f"or, if that run is given up, remove {path / 'spillway.data'}"
            )


def free_on(geometry: Geometry) -> int:
    """Bytes of the address space that its drives have room for; paths on one file system share what is free there."""
    row = sum(geometry.shares)
    shares: dict[int, int] = {}
    free: dict[int, int] = {}
    for name, share in zip(geometry.paths, geometry.shares, strict=True):
        path = Path(name)
        drive = existing(path).stat().st_dev
        shares[drive] = shares.get(drive, 0) + share
        free[drive] = free.get(drive, available(path)) + _reserved(path)
    return min(free[drive] * row // shares[drive] for drive in free)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No run uses the store path meanwhile. Raises DiskError where one does."""
    lock = _lock(path, os.O_RDWR | os.O_CREAT)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, flags: int) -> int:
    writes = bool(flags & os.O_CREAT)
    try:
        if writes:
            path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / _LOCK, flags, 0o644)
    except OSError as error:
        what = "written" if writes else "read"
        hint = "; choose another store" if writes else ""
        raise DiskError(f"the store path {path} cannot be {what}: {error.strerror}{hint}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DiskError(
            f"the store {path} is in use by another run (or a model of this process, until spillway.close); wait for "
            f"it or choose another store"
        ) from error
    return fd


def _open(file: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(file, flags | os.O_DIRECT, 0o644), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise DiskError(f"{file} cannot be opened: {error.strerror}; choose another store") from error
    try:
        return os.open(file, flags, 0o644), False
    except OSError as error:
        raise DiskError(f"{file} cannot be opened: {error.strerror}; choose another store") from error


def _reserve(file: Path, num_bytes: int) -> None:
    """Through a descriptor without O_DIRECT: where the file system reserves nothing itself (exFAT, NFS), the C library
    writes a byte of each of its blocks, which O_DIRECT would refuse."""
    if num_bytes == 0:
        return
    path = file.parent
    try:
        fd = os.open(file, os.O_RDWR)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise DiskError(
            f"the store {path} needs {format_size(num_bytes)} and has {format_size(free_bytes(path))} free "
            f"({error.strerror}): free some, add a store path, or use a smaller model"
        ) from error
