"""How long work takes: alone, and beside other work."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# How long is measured: work by itself, and beside other work.
ALONE_SECONDS, TOGETHER_SECONDS = 0.5, 0.2


def usual_seconds(work: Callable[[], object]) -> float:
    """What a run usually takes (the median of three or more, that together last so long), after one to warm up. The
    best one would be what a step reaches now and then."""
    work()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < ALONE_SECONDS:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def kept_together(
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
        until, both = time.perf_counter() + max(one_seconds, other_seconds, TOGETHER_SECONDS), list[float]()
        with ThreadPoolExecutor(1) as beside:  # ends it, too, where ours fails: what both use may go then
            others = beside.submit(share, other, until, both)
            share(one, until, both)
            others.result()
        shares.append(statistics.fmean(both))
    return min(max(statistics.median(shares), 0.25), 1.0)


def finish(device: torch.device) -> None:
    """Wait for a device that computes by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
