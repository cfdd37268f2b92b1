"""Measures this machine, in about a second: enough to predict a step."""

import math
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spillway.native import DiskEngine, Transfer
from spillway.optim.update import Hyper, StateRange, sum_squares, update_range
from spillway.spec.errors import DiskError
from spillway.spec.hardware import HardwareSpec
from spillway.spec.sizes import format_size
from spillway.spec.state import StateFormat
from spillway.store.arena import Arena
from spillway.store.checks import ExtentChecks
from spillway.store.layout import lay_out

_COPY_BYTES = 64 << 20
_DISK_BYTES = 128 << 20
_MOST_SHARES = 8
# Of the block that is measured: wider ones run at the same rate and would only take memory.
_MAX_HIDDEN, _MAX_ROWS = {"cpu": 1536, "cuda": 4096}, {"cpu": 1024, "cuda": 8192}
# Values a row of the block takes at its peak, per unit of width.
_ROW_VALUES = 32
_measured: dict[tuple[torch.device, torch.dtype, tuple[int, ...], int, int, StateFormat], HardwareSpec] = {}


def measure(
    device: torch.device,
    dtype: torch.dtype,
    paths: tuple[Path, ...],
    rows: int,
    hidden: int,
    form: StateFormat,
    room_bytes: int,
    device_room_bytes: int,
) -> HardwareSpec:
    """Rates of the device for `dtype`, of the links, of the drives under `paths`, and of the CPU's update.

    `rows` tokens at a time of width `hidden` are what the model computes; `form` is what its optimizer keeps. No more
    than `room_bytes` of host memory are taken, nor than `device_room_bytes` of the device's. Measured once per process,
    device, dtype, set of drives and shape.
    """
    for path in paths:
        _make(path)
    drives = tuple(path.stat().st_dev for path in paths)
    room = min(room_bytes, device_room_bytes)
    hidden = min(hidden, _MAX_HIDDEN[device.type], math.isqrt(room // (8 * 12 * dtype.itemsize)))
    hidden = max(hidden // 64 * 64, 64)
    rows = max(min(rows, _MAX_ROWS[device.type], room // (2 * _ROW_VALUES * hidden * dtype.itemsize)), 16)
    key = (device, dtype, drives, rows, hidden, form)
    known = _measured.get(key)
    if known is None:
        known = _measured[key] = _measure(device, dtype, paths, rows, hidden, form, room_bytes)
    return known


def _measure(
    device: torch.device,
    dtype: torch.dtype,
    paths: tuple[Path, ...],
    rows: int,
    hidden: int,
    form: StateFormat,
    room_bytes: int,
) -> HardwareSpec:
    copied = _within(_COPY_BYTES, room_bytes // 16)
    host = torch.ones(copied, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")  # as the arena is
    there = torch.ones(copied, dtype=torch.uint8, device=device)
    read, write, together = 1e18, 1e18, 1.0
    if paths:
        read, write, together = _disk_rates(paths, room_bytes // 8)
    elements, cpu = _within(1 << 22, room_bytes // 128), torch.device("cpu")
    update = _update_rate(cpu, form, elements, with_checksums=bool(paths))
    found = HardwareSpec(
        device.type,
        block_flops(device, dtype, rows, hidden),
        copied / usual_seconds(lambda: _copy(there, host)),
        copied / usual_seconds(lambda: _copy(host, there)),
        read,
        write,
        update,
        copied / usual_seconds(lambda: sum_squares(host.view(torch.float32), os.cpu_count() or 1)),
        cores_shared=device.type == "cpu",
        disk_together=together,
        device_update_params_per_s=update if device == cpu else _update_rate(device, form, 1 << 24, False),
        link_together=1.0 if device == cpu else _link_together(host, there),
    )
    if device.type == "cuda":  # what was measured in is not to be counted as anybody's
        del host, there
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def _link_together(host: torch.Tensor, there: torch.Tensor) -> float:
    """The share of its rate that each way over the link keeps while the other is used, too."""
    half = host.numel() // 2
    ways = [(there[:half], host[:half]), (host[half:], there[half:])]
    streams = [torch.cuda.Stream(there.device) for _ in ways]

    def both() -> None:
        for stream, (target, source) in zip(streams, ways, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        _finish(there.device)

    alone = max(usual_seconds(lambda way=way: _copy(*way)) for way in ways)  # type: ignore[misc]
    return min(max(alone / usual_seconds(both), 0.5), 1.0)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    _finish(target.device if target.is_cuda else source.device)


def _finish(device: torch.device) -> None:
    """Wait for a device that computes by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usual_seconds(work: Callable[[], object], at_least: float = 0.5) -> float:
    """What a run usually takes (the median of three or more, that together last so long), after one to warm up. The
    best one would be what a step reaches now and then."""
    work()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < at_least:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def block_flops(device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> float:
    """FLOP/s of a transformer block as a step computes it: forward, and recomputation with backward. Matrix products
    and the whole square of attention count as FLOPs, as in the model's profile."""
    # A generator of its own: what the user seeded must not move.
    source = torch.Generator(device).manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=source).to(dtype).requires_grad_()

    x, heads = made(rows, hidden), hidden // 64
    project, back = made(hidden, 3 * hidden), made(hidden, hidden)
    up, down = made(hidden, 6 * hidden), made(3 * hidden, hidden)
    functional = torch.nn.functional

    def forward() -> torch.Tensor:
        parts = (functional.rms_norm(x, (hidden,)) @ project).chunk(3, -1)
        query, key, value = (part.view(1, rows, heads, 64).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        middle = x + mixed.transpose(1, 2).reshape(rows, hidden) @ back
        gate, wide = (functional.rms_norm(middle, (hidden,)) @ up).chunk(2, -1)
        return middle + (functional.silu(gate) * wide) @ down

    def step() -> None:
        with torch.no_grad():
            forward()
        with torch.enable_grad():
            torch.autograd.grad(forward().sum(), [x, project, back, up, down])
        _finish(device)

    weights = sum(matrix.numel() for matrix in (project, back, up, down))
    return 4 * (2 * rows * weights + 4 * rows * rows * hidden) / usual_seconds(step)


def _within(wanted: int, room: int) -> int:
    """As much as is wanted and there is room for, in whole mebi, and at least one."""
    return max(min(wanted, room) >> 20, 1) << 20


def _update_rate(device: torch.device, form: StateFormat, elements: int, with_checksums: bool) -> float:
    """Parameters a second, with bfloat16 weights and gradients, and with the checksums of what goes to disk."""
    layout = lay_out([("probe", (elements,), torch.bfloat16, True)], form)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}

    def made(name: str, kind: torch.dtype) -> torch.Tensor | None:
        part = layout.component(name)
        return None if part is None else torch.zeros(part.num_bytes // kind.itemsize, dtype=kind, device=device)

    arrays = StateRange(
        form,
        0,
        torch.zeros(elements, dtype=torch.bfloat16, device=device),
        made("low", torch.int16 if form.low_bits == 16 else torch.uint8),
        made("m", kinds[form.moments]),
        made("v", kinds[form.moments]),
        made("scales", torch.uint8),
        torch.ones(elements, dtype=torch.bfloat16, device=device),
    )
    hyper = Hyper(1e-5, 0.9, 0.999, 1e-8, 0.0, 1)
    threads, checked = os.cpu_count() or 1, layout.extent_bytes if with_checksums else 0
    checks, content = ExtentChecks(layout), torch.zeros(checked, dtype=torch.uint8, device="cpu")

    def update() -> None:
        update_range(arrays, hyper, 1.0, threads)
        _finish(device)
        if with_checksums:
            checks.feed(0, content, threads)

    return elements / usual_seconds(update)


def _disk_rates(paths: tuple[Path, ...], room_bytes: int = _DISK_BYTES) -> tuple[float, float, float]:
    """Read and write bandwidth of all paths together, with the engines that training uses, and the share of them that
    is left when both go on at once. No more than `room_bytes` of host memory, and a quarter of what is free on a drive,
    are taken."""
    free = min(shutil.disk_usage(path).free for path in paths)
    num_bytes = _within(_DISK_BYTES, min(room_bytes, free // 4))
    engine, other = DiskEngine(), DiskEngine()
    buffer = Arena(num_bytes).buffer
    buffer.fill_(1)
    share = max(num_bytes // len(paths) >> 12, 1) << 12  # whole pages, for O_DIRECT
    files: list[tuple[Path, int]] = []
    try:
        for path in paths:
            files.append(_open_scratch(path / "spillway.probe"))
        transfers = [Transfer(fd, buffer.data_ptr() + index * share, 0, share) for index, (_, fd) in enumerate(files)]
        write = usual_seconds(lambda: engine.run(transfers, is_write=True))
        read = usual_seconds(lambda: engine.run(transfers, is_write=False))
        both = _seconds_together(engine, other, transfers, read, write)
    except OSError as error:
        where = ", ".join(str(path) for path in paths)
        raise DiskError(
            f"the store under {where} cannot be written: {error.strerror}, {format_size(free)} are free; make room "
            f"there or choose another --store"
        ) from error
    finally:
        engine.close()
        other.close()
        for file, fd in files:
            os.close(fd)
            file.unlink(missing_ok=True)
    moved = len(paths) * share
    return moved / read, moved / write, min(max(max(read, write) / both, 0.25), 1.0)


def _seconds_together(
    reading: DiskEngine, writing: DiskEngine, transfers: list[Transfer], read: float, write: float
) -> float:
    """Until both are over, when each does what takes it as long as the other alone. (A write of what is read meanwhile:
    its content does not matter.)"""
    slower = max(read, write)
    times_read, times_write = max(round(slower / read), 1), max(round(slower / write), 1)

    def repeat(engine: DiskEngine, times: int, is_write: bool) -> None:
        for _ in range(times):
            engine.run(transfers, is_write)

    def both() -> None:
        thread = threading.Thread(target=repeat, args=(writing, times_write, True))
        thread.start()
        repeat(reading, times_read, False)
        thread.join()

    return usual_seconds(both)


def measure_shares(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """How many stripes of a row each path should take, by the time it needs to write and read a byte. Drives of about
    the same speed, and paths on one drive, get one each."""
    for path in paths:
        _make(path)
    if len({path.stat().st_dev for path in paths}) < len(paths) or len(paths) == 1:
        return (1,) * len(paths)
    rates = [1 / (1 / read + 1 / write) for read, write, _ in (_disk_rates((path,)) for path in paths)]
    fastest = max(rates)
    shares = [max(1, round(_MOST_SHARES * rate / fastest)) for rate in rates]
    if min(shares) >= _MOST_SHARES - 1:
        return (1,) * len(paths)
    divisor = math.gcd(*shares)
    return tuple(share // divisor for share in shares)


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
