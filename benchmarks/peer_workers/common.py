"""What every worker does alike: the batches, the clock, the counters. Prints one JSON line per step."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

VOCABULARY = 8000


def batches(rows: int, length: int, steps: int) -> Iterator[torch.Tensor]:
    """The same token numbers for everybody, [rows, length]."""
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randint(0, VOCABULARY, (rows, length), generator=source)


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _moved_bytes() -> tuple[int, int]:
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def run(step: Callable[[torch.Tensor], float], rows: int, length: int, steps: int) -> None:
    """Call `step` (which returns the loss) with every batch and print what it took."""
    peak = [_anonymous_bytes()]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], _anonymous_bytes())
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    for ids in batches(rows, length, steps):
        before, start = _moved_bytes(), time.perf_counter()
        loss = step(ids)
        seconds, after = time.perf_counter() - start, _moved_bytes()
        row = {"seconds": seconds, "loss": loss, "read": after[0] - before[0], "written": after[1] - before[1]}
        print(json.dumps({**row, "peak": peak[0]}), flush=True)
    os._exit(0)
