"""Measures this machine, in some seconds: enough to predict a step. What was measured within a day is not measured
again."""

import math
import os
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from spillway.hardware import cache
from spillway.hardware.bandwidth import (
    SCRATCH_BYTES,
    Drives,
    Links,
    drive_rates,
    link_rates,
    make_directory,
    measure_shares,
    whole_mebi,
)
from spillway.hardware.block import Block, step_flops
from spillway.hardware.others import Others
from spillway.hardware.timing import finish, kept_together, usual_seconds
from spillway.optim.update import Hyper, StateRange, update_range
from spillway.spec.hardware import HardwareSpec
from spillway.spec.jsonable import from_json, to_json
from spillway.spec.state import StateFormat
from spillway.store.checks import ExtentChecks
from spillway.store.disk import Geometry
from spillway.store.layout import lay_out

_COPY_BYTES = 64 << 20
# Of the block that is measured: wider ones run at the same rate and would only take memory.
_MAX_HIDDEN, _MAX_ROWS = {"cpu": 1536, "cuda": 4096}, {"cpu": 1024, "cuda": 8192}
# Values a row of the block takes at its peak, per unit of width.
_ROW_VALUES = 32
# Rows and width of a block that shows how fast the device is about; and how long a step of the one measured may take.
# On a GPU a smaller one would show how fast kernels are launched.
_TRIAL, _STEP_SECONDS = {"cpu": (64, 256), "cuda": (1024, 1024)}, 2.0
T = TypeVar("T")
_measured: dict[tuple[torch.device, tuple[Hashable, ...]], Any] = {}


class Computing(NamedTuple):
    """FLOP/s of a block; and, where it is computed on the cores that update, the share of either rate that is left when
    both go on."""

    flops: float
    together: float


def measure(
    device: torch.device,
    dtype: torch.dtype,
    geometry: Geometry | None,
    rows: int,
    hidden: int,
    form: StateFormat,
    room_bytes: int,
    device_room_bytes: int,
) -> HardwareSpec:
    """Rates of the device for `dtype`, of the links, of the drives of a store, and of the CPU's update.

    `rows` tokens at a time of width `hidden` are what the model computes; `form` is what its optimizer keeps. No more
    than `room_bytes` of host memory are taken, nor than `device_room_bytes` of the device's. Each part is measured
    once, and again where it is measured with something else.
    """
    room = min(room_bytes, device_room_bytes)
    hidden = min(hidden, _MAX_HIDDEN[device.type], math.isqrt(room // (8 * 12 * dtype.itemsize)))
    hidden = max(hidden // 64 * 64, 64)
    rows = max(min(rows, _MAX_ROWS[device.type], room // (2 * _ROW_VALUES * hidden * dtype.itemsize)), 16)
    copied, elements = whole_mebi(_COPY_BYTES, room_bytes // 16), whole_mebi(1 << 22, room_bytes // 128)
    on_cpu, cpu, known = device.type == "cpu", torch.device("cpu"), len(_measured)
    links = _once(device, Links, ("links", copied), lambda: link_rates(device, copied))
    disk, checksums = Drives(1e18, 1e18, 1.0), 1e18
    if geometry is not None:
        paths, shares, scratch = geometry.directories, geometry.shares, whole_mebi(SCRATCH_BYTES, room_bytes // 8)
        drives = tuple(path.stat().st_dev for path in paths)
        disk = _once(device, Drives, ("drives", drives, shares, scratch), lambda: drive_rates(paths, shares, scratch))
        checksums = _once(device, float, ("checksums", form, elements), lambda: _checksum_rate(form, elements))
    update = _updates_once(cpu, form, elements)
    block = _once(
        device,
        Computing,
        ("block", dtype, rows, hidden, form, elements),
        lambda: _block_rates(device, dtype, rows, hidden, form, elements),
    )
    found = HardwareSpec(
        device.type,
        block.flops,
        links.upload,
        links.download,
        disk.read,
        disk.write,
        update,
        links.reading,
        cores_shared=on_cpu,
        cores_together=block.together,
        disk_together=disk.together,
        device_update_params_per_s=update if on_cpu else _updates_once(device, form, 1 << 24),
        checksum_params_per_s=checksums,
        link_together=links.together,
    )
    if device.type == "cuda" and len(_measured) > known:  # what was measured in is not to be counted as anybody's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def geometry_of(paths: tuple[Path, ...]) -> Geometry | None:
    """How a new store is cut over these paths: by their measured speed. None without paths. Raises DiskError where one
    cannot be written."""
    if not paths:
        return None
    for path in paths:
        make_directory(path)
    cpu, drives = torch.device("cpu"), tuple(path.stat().st_dev for path in paths)
    shares = _once(cpu, tuple[int, ...], ("shares", drives), lambda: measure_shares(paths))
    return Geometry(tuple(map(str, paths)), shares)


def forget(device: torch.device) -> None:
    """All that was measured with the device."""
    _measured.clear()
    for name in {str(device), "cpu"}:
        cache.forget(name)


def _once(device: torch.device, kind: type[T], key: tuple[Hashable, ...], rates: Callable[[], T]) -> T:
    """What is measured, the first time that it is asked for."""
    if (device, key) not in _measured:
        kept, others = cache.recall(str(device), key), Others()
        _measured[device, key] = rates() if kept is None else from_json(kind, kept)
        if kept is None:
            fresh = cache.DISTURBED_FRESH_S if others.disturb else cache.FRESH_S
            cache.keep(str(device), key, to_json(_measured[device, key]), fresh)
    found: T = _measured[device, key]
    return found


def _updates_once(device: torch.device, form: StateFormat, elements: int) -> float:
    def rate() -> float:
        return elements / usual_seconds(_update_of(device, form, elements))

    return _once(device, float, ("updates", form, elements), rate)


def _block_rates(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int, form: StateFormat, elements: int
) -> Computing:
    block = Block(device, dtype, *_quick(device, dtype, rows, hidden))
    seconds, kept = usual_seconds(block.step), 0.5
    if device.type == "cpu":
        update = _update_of(device, form, elements)
        kept = kept_together(block.step, update, seconds, elements / _updates_once(device, form, elements))
    return Computing(block.flops / seconds, kept)


def _quick(device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> tuple[int, int]:
    """Rows and width of a block of which a step does not take long: less than was asked for on a processor without
    instructions for the dtype."""
    few, narrow = _TRIAL[device.type]
    trial = Block(device, dtype, min(rows, few), min(hidden, narrow))
    trial.step()
    began = time.perf_counter()
    trial.step()
    flops = trial.flops * _STEP_SECONDS / (time.perf_counter() - began)
    while step_flops(rows, hidden) > flops and (rows > few or hidden > narrow):
        if rows > few:
            rows //= 2
        else:
            hidden = max(hidden // 128 * 64, narrow)
    return rows, hidden


def _update_of(device: torch.device, form: StateFormat, elements: int) -> Callable[[], None]:
    """Updates so many parameters, with bfloat16 weights and gradients."""
    layout = lay_out([("probe", (elements,), torch.bfloat16, True)], form)

    def made(name: str) -> torch.Tensor | None:
        part = layout.component(name)
        if part is None:
            return None
        return torch.zeros(part.num_bytes // part.dtype.itemsize, dtype=part.dtype, device=device)

    arrays = StateRange(
        form,
        0,
        torch.zeros(elements, dtype=torch.bfloat16, device=device),
        made("low"),
        made("m"),
        made("v"),
        made("scales"),
        torch.ones(elements, dtype=torch.bfloat16, device=device),
    )
    hyper = Hyper(1e-5, 0.9, 0.999, 1e-8, 0.0, 1)
    threads = os.cpu_count() or 1

    def update() -> None:
        update_range(arrays, hyper, 1.0, threads)
        finish(device)

    return update


def _checksum_rate(form: StateFormat, elements: int) -> float:
    """Parameters a second whose states and bfloat16 weights are passed through for the checksums of what goes to
    disk."""
    layout = lay_out([("probe", (elements,), torch.bfloat16, True)], form)
    checks, content = ExtentChecks(layout), torch.zeros(layout.extent_bytes, dtype=torch.uint8, device="cpu")
    return elements / usual_seconds(lambda: checks.feed(0, content, os.cpu_count() or 1))
