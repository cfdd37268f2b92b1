"""Measures this machine, in about a second: enough to predict a step."""

import math
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
T = TypeVar("T")
_measured: dict[tuple[Hashable, ...], Any] = {}


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
    than `room_bytes` of host memory are taken, nor than `device_room_bytes` of the device's. Each part is measured once
    per process, and what it is measured with.
    """
    for path in paths:
        _make(path)
    room = min(room_bytes, device_room_bytes)
    hidden = min(hidden, _MAX_HIDDEN[device.type], math.isqrt(room // (8 * 12 * dtype.itemsize)))
    hidden = max(hidden // 64 * 64, 64)
    rows = max(min(rows, _MAX_ROWS[device.type], room // (2 * _ROW_VALUES * hidden * dtype.itemsize)), 16)
    copied, elements = _within(_COPY_BYTES, room_bytes // 16), _within(1 << 22, room_bytes // 128)
    on_cpu, cpu, known = device.type == "cpu", torch.device("cpu"), len(_measured)
    links = _once(("links", device, copied), lambda: _link_rates(device, copied))
    read, write, disk_together, checksums = 1e18, 1e18, 1.0, 1e18
    if paths:
        drives, scratch = tuple(path.stat().st_dev for path in paths), _within(_DISK_BYTES, room_bytes // 8)
        read, write, disk_together = _once(("drives", drives, scratch), lambda: _disk_rates(paths, scratch))
        checksums = _once(("checksums", form, elements), lambda: _checksum_rate(form, elements))
    update = _updates_once(cpu, form, elements)
    flops, cores_together = _once(
        ("block", device, dtype, rows, hidden, form, elements),
        lambda: _block_rates(device, dtype, rows, hidden, form, elements),
    )
    found = HardwareSpec(
        device.type,
        flops,
        links.upload,
        links.download,
        read,
        write,
        update,
        links.reading,
        cores_shared=on_cpu,
        cores_together=cores_together,
        disk_together=disk_together,
        device_update_params_per_s=update if on_cpu else _updates_once(device, form, 1 << 24),
        checksum_params_per_s=checksums,
        link_together=links.together,
    )
    if device.type == "cuda" and len(_measured) > known:  # what was measured in is not to be counted as anybody's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


# Of a block that shows how long a step takes; and how long one may.
_TRIAL_ROWS, _STEP_SECONDS = 64, 8.0


def _once(key: tuple[Hashable, ...], rates: Callable[[], T]) -> T:
    """What is measured, the first time that it is asked for."""
    if key not in _measured:
        _measured[key] = rates()
    found: T = _measured[key]
    return found


def _updates_once(device: torch.device, form: StateFormat, elements: int) -> float:
    return _once(
        ("updates", device, form, elements), lambda: elements / usual_seconds(_update_of(device, form, elements))
    )


class _Links(NamedTuple):
    """Bytes a second, and the share of each way's rate that is left when both are used."""

    upload: float
    download: float
    reading: float  # a pass over host memory
    together: float


def _link_rates(device: torch.device, num_bytes: int) -> _Links:
    host = torch.ones(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")  # as the arena is
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    return _Links(
        num_bytes / usual_seconds(lambda: _copy(there, host)),
        num_bytes / usual_seconds(lambda: _copy(host, there)),
        num_bytes / usual_seconds(lambda: sum_squares(host.view(torch.float32), os.cpu_count() or 1)),
        1.0 if device.type == "cpu" else _link_together(host, there),
    )


def _block_rates(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int, form: StateFormat, elements: int
) -> tuple[float, float]:
    """FLOP/s of a block; and, where it is computed on the cores that update, the share of either rate that is left when
    both go on."""
    trial, began = Block(device, dtype, min(rows, _TRIAL_ROWS), hidden), time.perf_counter()
    trial.step()
    rate = trial.flops / (time.perf_counter() - began)
    block = Block(device, dtype, rows, hidden)
    if block.flops > _STEP_SECONDS * rate:  # a processor without instructions for the dtype
        block = trial
    seconds, kept = usual_seconds(block.step), 0.5
    if device.type == "cpu":
        update = _update_of(device, form, elements)
        kept = _kept_together(block.step, update, seconds, elements / _updates_once(device, form, elements))
    return block.flops / seconds, kept


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
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < at_least:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Block:
    """A transformer block as a step computes it, written as in transformers: norms and rotations of single operators.
    Matrix products and the whole square of attention count as FLOPs, as in the model's profile."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> None:
        # A generator of its own: what the user seeded must not move.
        source = torch.Generator(device).manual_seed(0)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=source).to(dtype)

        self._device, self._rows, self._heads = device, rows, hidden // 64
        self._x = made(rows, hidden).requires_grad_()
        self._turns = made(rows, 64), made(rows, 64)
        shapes = [(3 * hidden, hidden), (hidden, hidden), (6 * hidden, hidden), (hidden, 3 * hidden)]
        self._weights = [made(*shape).requires_grad_() for shape in shapes]
        self._sums = [torch.empty_like(weight) for weight in self._weights]
        weights = sum(weight.numel() for weight in self._weights)
        self.flops = 4 * (2 * rows * weights + 4 * rows * rows * hidden)  # of a step, in matrix products

    def step(self) -> None:
        """Forward, and recomputation with backward, whose gradients go to where they are summed."""
        with torch.no_grad():
            self._forward()
        with torch.enable_grad():
            _, *grads = torch.autograd.grad(self._forward().sum(), [self._x, *self._weights])
        for total, grad in zip(self._sums, grads, strict=True):
            total.copy_(grad)
        _finish(self._device)

    def _forward(self) -> torch.Tensor:
        functional, (project, back, up, down) = torch.nn.functional, self._weights
        parts = functional.linear(_norm(self._x), project).chunk(3, -1)
        query, key, value = (part.view(1, self._rows, self._heads, 64).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(self._turn(query), self._turn(key), value, is_causal=True)
        middle = self._x + functional.linear(mixed.transpose(1, 2).reshape(self._x.shape), back)
        gate, wide = functional.linear(_norm(middle), up).chunk(2, -1)
        return middle + functional.linear(functional.silu(gate) * wide, down)

    def _turn(self, part: torch.Tensor) -> torch.Tensor:
        """Rotary positions."""
        first, second = part.chunk(2, -1)
        return part * self._turns[0] + torch.cat((-second, first), -1) * self._turns[1]


def _norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _within(wanted: int, room: int) -> int:
    """As much as is wanted and there is room for, in whole mebi, and at least one."""
    return max(min(wanted, room) >> 20, 1) << 20


def _update_of(device: torch.device, form: StateFormat, elements: int) -> Callable[[], None]:
    """Updates so many parameters, with bfloat16 weights and gradients."""
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
    threads = os.cpu_count() or 1

    def update() -> None:
        update_range(arrays, hyper, 1.0, threads)
        _finish(device)

    return update


def _checksum_rate(form: StateFormat, elements: int) -> float:
    """Parameters a second whose states and bfloat16 weights are passed through for the checksums of what goes to
    disk."""
    layout = lay_out([("probe", (elements,), torch.bfloat16, True)], form)
    checks, content = ExtentChecks(layout), torch.zeros(layout.extent_bytes, dtype=torch.uint8, device="cpu")
    return elements / usual_seconds(lambda: checks.feed(0, content, os.cpu_count() or 1))


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
        together = _kept_together(
            lambda: engine.run(transfers, is_write=False), lambda: other.run(transfers, is_write=True), read, write
        )
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
    return moved / read, moved / write, together


def _kept_together(
    one: Callable[[], object], other: Callable[[], object], one_seconds: float, other_seconds: float
) -> float:
    """The share of its rate that either keeps, on average, while the other goes on, too. (For drives, a write of what
    is read meanwhile: its content does not matter.)"""
    alone = {one: one_seconds, other: other_seconds}

    def share(work: Callable[[], object], until: float, found: list[float]) -> None:
        # By the clock and not by a count: where others want the cores, too, small pieces may take a hundred times as
        # long as they did alone.
        began, times = time.perf_counter(), 0
        while not times or time.perf_counter() < until:
            work()
            times += 1
        found.append(times * alone[work] / (time.perf_counter() - began))

    shares: list[float] = []
    for _ in range(3):
        until, both = time.perf_counter() + max(one_seconds, other_seconds, 0.2), list[float]()
        thread = threading.Thread(target=share, args=(other, until, both))
        thread.start()
        share(one, until, both)
        thread.join()
        shares.append(statistics.fmean(both))
    return min(max(statistics.median(shares), 0.25), 1.0)


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
