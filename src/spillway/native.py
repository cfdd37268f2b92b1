"""The only file that knows the native library: disk transfers and optimizer kernels through a C ABI.

Where the library cannot be loaded every function here has a plain counterpart (`os.preadv`, PyTorch AdamW), so
training goes on, slower; `load_problem()` says why, and the report says it once.
"""

import ctypes
import errno
import functools
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spillway.crc32c import crc32c

_ABI_VERSION = 5
_LIBRARY = "libspillway_native.so"
FLOAT32, BFLOAT16, FLOAT16, EIGHT_BIT = 0, 1, 2, 3
ADAMW, LION, SGD = 0, 1, 2
# A drive may fail a request once and serve it the next time; one that fails as often as this is broken.
_TRIES = 4


class Transfer(NamedTuple):
    """One contiguous move between a file and memory, all 4096-aligned under O_DIRECT."""

    fd: int
    address: int
    offset: int
    num_bytes: int


# Transfers as the engine takes them, without a Python object each: an array of these (spillway_transfer in
# native/include/spillway.h, whose `is_write` the engine sets).
TRANSFER = np.dtype(
    [("fd", np.int32), ("is_write", np.int32), ("address", np.uint64), ("offset", np.uint64), ("num_bytes", np.uint64)]
)
Batch = npt.NDArray[np.void]


def batch_of(transfers: Iterable[Transfer]) -> Batch:
    """These, in their order."""
    return np.array([(fd, 0, address, offset, size) for fd, address, offset, size in transfers], TRANSFER)


def transfers_of(batch: Batch) -> Iterator[Transfer]:
    """What `batch_of` was given."""
    yield from (Transfer(*map(int, (fd, address, offset, size))) for fd, _, address, offset, size in batch)


class TransferError(OSError):
    """A transfer failed; `index` is its place in the batch."""

    def __init__(self, error: int, index: int) -> None:
        super().__init__(error, os.strerror(error))
        self.index = index


class UpdateArgs(ctypes.Structure):
    """Mirror of spillway_update_args in native/include/spillway.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("m", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("n", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("rule", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("low_bits", ctypes.c_int32),
        ("moment_type", ctypes.c_int32),
        ("grad_type", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("grad_scale", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("l2", ctypes.c_float),
        ("beta1", ctypes.c_float),
        ("one_minus_beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("one_minus_beta2", ctypes.c_float),
        ("bias_correction2_sqrt", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("negative_step_size", ctypes.c_float),
    )


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    path = Path(__file__).with_name(_LIBRARY)
    try:
        library = ctypes.CDLL(str(path))
        library.spillway_abi_version.restype = ctypes.c_int32
        found = library.spillway_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"the native library could not be loaded ({error})"
    if found != _ABI_VERSION:
        return None, f"{path} is of another version (ABI {found}, this Spillway needs {_ABI_VERSION})"
    library.spillway_kernel_name.restype = ctypes.c_char_p
    library.spillway_io_open.restype = ctypes.c_void_p
    library.spillway_io_open.argtypes = (ctypes.c_uint32, ctypes.c_int32)
    library.spillway_io_close.argtypes = (ctypes.c_void_p,)
    library.spillway_io_backend.restype = ctypes.c_char_p
    library.spillway_io_backend.argtypes = (ctypes.c_void_p,)
    library.spillway_io_register.restype = ctypes.c_int32
    library.spillway_io_register.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_uint64,
    )
    library.spillway_touch.restype = None
    library.spillway_touch.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32)
    library.spillway_io_run.restype = ctypes.c_int32
    library.spillway_io_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_uint64),
    )
    library.spillway_crc32c.restype = None
    library.spillway_crc32c.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_int32,
    )
    library.spillway_update.restype = ctypes.c_int32
    library.spillway_update.argtypes = (ctypes.POINTER(UpdateArgs), ctypes.c_int32)
    library.spillway_sum_squares.restype = ctypes.c_double
    library.spillway_sum_squares.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int32)
    return library, ""


def available() -> bool:
    """Whether the native library is loaded."""
    return _load()[0] is not None


def load_problem() -> str:
    """Why the native library is not in use; empty when it is."""
    return _load()[1]


def kernel_name() -> str:
    """The instruction set of the optimizer kernels, or 'pytorch' without the native library."""
    library = _load()[0]
    return "pytorch" if library is None else str(library.spillway_kernel_name().decode())


def update(args: UpdateArgs, threads: int) -> None:
    """One optimizer step in place; needs `available()`. The GIL is not held."""
    library = _load()[0]
    if library is None or library.spillway_update(ctypes.byref(args), threads) != 0:
        raise ValueError("the native optimizer kernel refused its arguments")


def sum_squares(address: int, dtype: int, numel: int, threads: int) -> float:
    """Sum of squares in double precision; needs `available()`. The same bits whatever `threads` is."""
    library = _load()[0]
    if library is None:
        raise ValueError("the native library is not loaded")
    return float(library.spillway_sum_squares(address, dtype, numel, threads))


def checksum(address: int, num_bytes: int, first: int, piece: int, values: "array[int]", at: int, threads: int) -> None:
    """Advance the CRC-32C `values[at:]` over memory in pieces: the first of `first` bytes, the others of `piece`."""
    library = _load()[0]
    if library is not None:
        library.spillway_crc32c(
            address, num_bytes, first, piece, values.buffer_info()[0] + at * values.itemsize, threads
        )
        return
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    done, size = 0, first
    while done < num_bytes:
        values[at] = crc32c(memory[done : done + size], values[at])
        done, size, at = done + size, piece, at + 1


def touch(address: int, num_bytes: int, threads: int) -> None:
    """Take the pages of fresh memory from the system now, on several threads; without the native library later, when
    each is first written to."""
    library = _load()[0]
    if library is not None:
        library.spillway_touch(address, num_bytes, threads)


class DiskEngine:
    """Runs batches of transfers at full queue depth. One batch at a time: every lane has its own engine."""

    def __init__(self, depth: int = 32, block_bytes: int = 1 << 20, use_uring: bool = True) -> None:
        self._block_bytes = block_bytes
        self._library = _load()[0]
        self._handle: int | None = None
        self._threads: ThreadPoolExecutor | None = None
        if self._library is not None:
            self._handle = self._library.spillway_io_open(depth, int(use_uring))
        else:
            self._threads = ThreadPoolExecutor(min(depth, 8), thread_name_prefix="spillway-io")

    @property
    def backend(self) -> str:
        """'io_uring', 'threads' (native) or 'preadv' (plain Python)."""
        if self._library is None or self._handle is None:
            return "preadv"
        return str(self._library.spillway_io_backend(self._handle).decode())

    def run(self, batch: Batch, is_write: bool) -> None:
        """Move every byte; returns when all are done. Raises TransferError."""
        if self._library is None or self._handle is None:
            self._run_plain(batch, is_write)
            return
        batch = batch.copy()  # another engine may run the same in the other direction
        batch["is_write"] = is_write
        failed = ctypes.c_uint64(0)
        code = self._library.spillway_io_run(
            self._handle, batch.ctypes.data, len(batch), self._block_bytes, ctypes.byref(failed)
        )
        if code != 0:
            raise TransferError(-code, failed.value)

    def register(self, files: Sequence[int], address: int, num_bytes: int) -> bool:
        """Make files and a range of memory known to the kernel once, in the place of earlier ones; nothing registered
        with no files and no bytes. The memory must stay mapped until then. Whether the kernel took all of it: transfers
        work either way, with a little less effort where it did."""
        if self._library is None or self._handle is None:
            return False
        fds = (ctypes.c_int32 * len(files))(*files)
        return bool(
            self._library.spillway_io_register(self._handle, fds, len(files), address if num_bytes else None, num_bytes)
            == 0
        )

    def close(self) -> None:
        """Give back threads or rings; the engine cannot be used afterwards."""
        handle, self._handle = self._handle, None  # also where it is closed twice, from two threads or a signal
        if self._library is not None and handle is not None:
            self._library.spillway_io_close(handle)
        if self._threads is not None:
            self._threads.shutdown()

    def _run_plain(self, batch: Batch, is_write: bool) -> None:
        if self._threads is None:
            raise ValueError("the disk engine is closed")
        moves: list[Future[None]] = []
        try:
            for index, whole in enumerate(transfers_of(batch)):
                for part in _cut(whole, 8 * self._block_bytes):
                    moves.append(self._threads.submit(_move_plain, part, index, is_write))
            wait(moves)
        except BaseException:
            for move in moves:
                move.cancel()
            wait(moves)
            raise
        for move in moves:  # nothing is in flight when an error is told
            move.result()


def _cut(whole: Transfer, block_bytes: int) -> list[Transfer]:
    starts = range(0, whole.num_bytes, block_bytes)
    return [
        Transfer(whole.fd, whole.address + at, whole.offset + at, min(block_bytes, whole.num_bytes - at))
        for at in starts
    ]


def _move_plain(part: Transfer, index: int, is_write: bool) -> None:
    view = memoryview((ctypes.c_char * part.num_bytes).from_address(part.address)).cast("B")
    move = os.pwritev if is_write else os.preadv
    done, tries = 0, 0
    while done < part.num_bytes:
        try:
            moved = move(part.fd, [view[done:]], part.offset + done)
        except OSError as error:
            tries += 1
            if error.errno == errno.EIO and tries < _TRIES:
                continue
            raise TransferError(error.errno or errno.EIO, index) from error
        if moved == 0:
            raise TransferError(errno.ENOSPC if is_write else errno.ENODATA, index)
        done += moved
