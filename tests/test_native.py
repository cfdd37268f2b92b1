"""Disk engines and the native part's threads, where something goes wrong around them."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spillway import native
from spillway.native import DiskEngine, Transfer, TransferError, batch_of

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native library: {native.load_problem()}")

FORKED = """
import ctypes, os, sys, torch
from spillway.native import FLOAT32, DiskEngine, Transfer, batch_of, sum_squares

numbers = torch.ones(1 << 20)
expected = sum_squares(numbers.data_ptr(), FLOAT32, numbers.numel(), 2)
engine = DiskEngine(use_uring=False)
fd = os.open(sys.argv[1], os.O_RDWR)
moves = batch_of([Transfer(fd, numbers.data_ptr() + at, at, 1 << 19) for at in range(0, 1 << 22, 1 << 19)])
engine.run(moves, True)
child = os.fork()
if child == 0:
    ctypes.memset(numbers.data_ptr(), 0, 1 << 22)
    engine.run(moves, False)
    engine.close()
    found = sum_squares(numbers.data_ptr(), FLOAT32, numbers.numel(), 2)
    os._exit(0 if found == expected else 1)
_, status = os.waitpid(child, 0)
engine.run(moves, True)
engine.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@needs_native
def test_a_forked_process_has_threads_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 22))
    subprocess.run([sys.executable, "-c", FORKED, str(file)], check=True, timeout=60)


@needs_native
def test_a_ring_that_the_kernel_refuses_is_an_error_and_no_wait_without_end(tmp_path: Path) -> None:
    before = _rings()
    engine = DiskEngine()
    (ring,) = _rings() - before or {None}
    if ring is None:
        pytest.skip("io_uring is not to be had here")
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    with file.open("rb") as opened, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), ring)
        memory = ctypes.create_string_buffer(8192)
        transfer = Transfer(opened.fileno(), ctypes.addressof(memory), 0, 8192)
        for _ in range(2):
            with pytest.raises(TransferError):
                engine.run(batch_of([transfer]), False)
    engine.close()


def _rings() -> set[int]:
    links = {fd: Path(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd"))}
    return {fd for fd, link in links.items() if link.is_symlink() and "io_uring" in os.readlink(link)}


def test_an_engine_may_be_closed_twice_and_is_refused_afterwards(tmp_path: Path) -> None:
    engine = DiskEngine()
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.run(batch_of([Transfer(0, 0, 0, 4096)]), False)


def test_an_interrupted_batch_of_the_plain_engine_leaves_nothing_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "left out"))
    moving: set[int] = set()

    def slow(part: Transfer, index: int, is_write: bool) -> None:
        moving.add(part.offset)
        time.sleep(0.2)
        moving.discard(part.offset)

    monkeypatch.setattr(native, "_move_plain", slow)
    engine = DiskEngine(depth=2)
    memory = ctypes.create_string_buffer(8 * 4096)
    batch = batch_of([Transfer(0, ctypes.addressof(memory) + at, at, 4096) for at in range(0, 8 * 4096, 4096)])
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        engine.run(batch, False)
    assert not moving
    time.sleep(0.3)
    assert not moving, "more was begun after the error"
    engine.close()
