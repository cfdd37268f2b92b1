"""Measures this machine, in about a second: enough to predict a step."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spillway.native import DiskEngine, Transfer
from spillway.optim.update import Hyper, StateRange, sum_squares, update_range
from spillway.spec.errors import DiskError
from spillway.spec.hardware import HardwareSpec
from spillway.store.arena import Arena

_COPY_BYTES = 64 << 20
_DISK_BYTES = 128 << 20
_measured: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], HardwareSpec] = {}


def measure(
    device: torch.device,
    dtype: torch.dtype,
    paths: tuple[Path, ...],
    copy: Callable[[torch.Tensor, torch.Tensor], None],
) -> HardwareSpec:
    """Rates of the device for `dtype`, of the links, of the drives under `paths`, and of the CPU's update.

    `copy(target, source)` moves bytes between host and device and returns when they are there. Measured once per
    process, device, dtype and set of drives.
    """
    for path in paths:
        _make(path)
    drives = tuple(path.stat().st_dev for path in paths)
    known = _measured.get((device, dtype, drives))
    if known is None:
        known = _measured[device, dtype, drives] = _measure(device, dtype, paths, copy)
    return known


def _measure(
    device: torch.device,
    dtype: torch.dtype,
    paths: tuple[Path, ...],
    copy: Callable[[torch.Tensor, torch.Tensor], None],
) -> HardwareSpec:
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    there = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    read, write = _disk_rates(paths) if paths else (1e18, 1e18)
    return HardwareSpec(
        device.type,
        _flops(device, dtype),
        _COPY_BYTES / best_seconds(lambda: copy(there, host)),
        _COPY_BYTES / best_seconds(lambda: copy(host, there)),
        read,
        write,
        _update_rate(),
        _COPY_BYTES / best_seconds(lambda: sum_squares(host.view(torch.float32), os.cpu_count() or 1)),
        cores_shared=device.type == "cpu",
    )


def best_seconds(work: Callable[[], object], times: int = 3) -> float:
    """The shortest of a few runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Of the two matrix products of a feed-forward block over a few hundred tokens."""
    tokens, hidden = (512, 1024) if device.type == "cpu" else (4096, 4096)
    # A generator of its own: what the user seeded must not move.
    source = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, hidden, device=device, generator=source).to(dtype)
    up = torch.randn(hidden, 4 * hidden, device=device, generator=source).to(dtype)
    down = torch.randn(4 * hidden, hidden, device=device, generator=source).to(dtype)

    def block() -> None:
        torch.nn.functional.silu(x @ up) @ down
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * 2 * tokens * hidden * 4 * hidden / best_seconds(block)


def _update_rate() -> float:
    elements = 1 << 22
    arrays = StateRange(
        torch.zeros(elements, dtype=torch.bfloat16),
        torch.zeros(elements, dtype=torch.int16),
        torch.zeros(elements),
        torch.zeros(elements),
        torch.ones(elements, dtype=torch.bfloat16),
    )
    hyper = Hyper(1e-5, 0.9, 0.999, 1e-8, 0.0, 1)
    return elements / best_seconds(lambda: update_range(arrays, hyper, 1.0, os.cpu_count() or 1))


def _disk_rates(paths: tuple[Path, ...]) -> tuple[float, float]:
    """Read and write bandwidth of all paths together, with the engine that training uses."""
    engine = DiskEngine()
    buffer = Arena(_DISK_BYTES).buffer
    buffer.fill_(1)
    share = _DISK_BYTES // len(paths) >> 20 << 20  # whole pages, for O_DIRECT
    files: list[tuple[Path, int]] = []
    try:
        for path in paths:
            files.append(_open_scratch(path / "spillway.probe"))
        transfers = [Transfer(fd, buffer.data_ptr() + index * share, 0, share) for index, (_, fd) in enumerate(files)]
        write = best_seconds(lambda: engine.run(transfers, is_write=True), 2)
        read = best_seconds(lambda: engine.run(transfers, is_write=False), 2)
    except OSError as error:
        where = ", ".join(str(path) for path in paths)
        raise DiskError(
            f"the store under {where} cannot be written: {error.strerror}; choose another --store"
        ) from error
    finally:
        engine.close()
        for file, fd in files:
            os.close(fd)
            file.unlink(missing_ok=True)
    return len(paths) * share / read, len(paths) * share / write


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"the store path {path} cannot be written: {error.strerror}; choose another --store") from error


def _open_scratch(file: Path) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return file, os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        return file, os.open(file, flags, 0o600)
