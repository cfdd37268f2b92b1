"""Our disk engine beside fio: the same file, block size and depth, in turns, in one run.

    python benchmarks/io.py [--directory DIR] [--size 2GiB] [--block 1MiB] [--depth 32] [--rounds 5]
                            [--json FILE] [--check]

Prints bandwidth (GB/s) and CPU seconds per GB for reading, writing and a 50/50 mix; medians over the rounds. Targets:
at least 0.97 of fio's bandwidth in each. Needs `fio` (apt install fio).
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from ending import exit_code, parser_of, write_json

from spillway.native import DiskEngine
from spillway.spec.sizes import format_size, parse_size
from spillway.store.arena import Arena
from spillway.store.disk import Extent, Geometry, StripedDisk

TARGET = 0.97
PATTERNS = ("read", "write", "mixed")
_BATCH_BYTES = 64 << 20  # what a lane moves at once: a subgroup's states


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; bytes per second, CPU seconds per 10^9 bytes."""

    pattern: str
    ours_bytes_per_s: float
    fio_bytes_per_s: float
    ratio: float  # median of the rounds' ratios
    ours_cpu_s_per_gb: float
    fio_cpu_s_per_gb: float


class Ours:
    """The engine and the striped disk as the lanes use them: one engine per direction."""

    def __init__(self, directory: Path, size: int, block: int, depth: int) -> None:
        self._disk = StripedDisk(Geometry((str(directory),), (1,)), keep=False)
        self._disk.reserve(size)
        self._size = size
        self._buffers = [Arena(_BATCH_BYTES).buffer for _ in range(2)]
        for buffer in self._buffers:
            buffer.random_(0, 256)
        self._engines = [DiskEngine(depth, block), DiskEngine(depth, block)]
        for engine, buffer in zip(self._engines, self._buffers, strict=True):
            engine.register(self._disk.files, buffer.data_ptr(), buffer.numel())
        self.backend = self._engines[0].backend
        self._sweep(True, 0, size)

    def _sweep(self, is_write: bool, start: int, stop: int) -> None:
        engine, buffer = self._engines[is_write], self._buffers[is_write]
        for at in range(start, stop, _BATCH_BYTES):
            extent = Extent(at, min(_BATCH_BYTES, stop - at))
            if is_write:
                self._disk.write_all(engine, [(extent, buffer[: extent.num_bytes])])
            else:
                self._disk.read(engine, extent, buffer[: extent.num_bytes])

    def run(self, pattern: str) -> tuple[float, float]:
        """Seconds, and CPU seconds."""
        before, begin = _cpu_seconds(), time.perf_counter()
        if pattern == "mixed":
            half = self._size // 2
            writer = threading.Thread(target=self._sweep, args=(True, half, self._size))
            writer.start()
            self._sweep(False, 0, half)
            writer.join()
        else:
            self._sweep(pattern == "write", 0, self._size)
        return time.perf_counter() - begin, _cpu_seconds() - before

    def close(self) -> None:
        """Give everything back."""
        for engine in self._engines:
            engine.close()
        self._disk.close()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def fio(file: Path, size: int, block: int, depth: int, pattern: str) -> tuple[float, float]:
    """Seconds and CPU seconds of the same work by fio: it leaves its buffers as they are, and a mix is two jobs, each
    with its half of the file and the whole depth, as ours is."""
    command = ["fio", f"--filename={file}", f"--bs={block}", "--direct=1", f"--iodepth={depth}", "--ioengine=io_uring"]
    command += ["--registerfiles", "--fixedbufs", "--refill_buffers=0", "--scramble_buffers=0", "--fallocate=none"]
    command += ["--output-format=json"]
    half = size // 2
    parts = [(pattern, 0, size)] if pattern != "mixed" else [("read", 0, half), ("write", half, half)]
    for kind, offset, length in parts:
        command += [f"--name={kind}", f"--rw={kind}", f"--offset={offset}", f"--size={length}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    times = [
        (job, max(job["read"]["runtime"], job["write"]["runtime"]) / 1000) for job in json.loads(done.stdout)["jobs"]
    ]
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds for job, seconds in times)
    return max(seconds for _, seconds in times), cpu


def measure(directory: Path, size: int, block: int, depth: int, rounds: int) -> list[Result]:
    """All patterns, ours and fio's in turns."""
    ours = Ours(directory / "ours", size, block, depth)
    file = directory / "fio.data"
    with open(file, "wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, size)
    fio(file, size, block, depth, "write")
    print(f"engine {ours.backend}, {format_size(size)}, blocks of {format_size(block)}, depth {depth}")
    results = []
    for pattern in PATTERNS:
        times: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for number in range(rounds):
            if number % 2:
                theirs = fio(file, size, block, depth, pattern)
                times.append((ours.run(pattern), theirs))
            else:
                mine = ours.run(pattern)
                times.append((mine, fio(file, size, block, depth, pattern)))
        results.append(
            Result(
                pattern,
                size / statistics.median(mine[0] for mine, _ in times),
                size / statistics.median(theirs[0] for _, theirs in times),
                statistics.median(theirs[0] / mine[0] for mine, theirs in times),
                statistics.median(mine[1] for mine, _ in times) / (size / 1e9),
                statistics.median(theirs[1] for _, theirs in times) / (size / 1e9),
            )
        )
        last = results[-1]
        print(
            f"{pattern:6} ours {last.ours_bytes_per_s / 1e9:6.2f} GB/s, fio {last.fio_bytes_per_s / 1e9:6.2f} GB/s, "
            f"ratio {last.ratio:.3f} · CPU s/GB ours {last.ours_cpu_s_per_gb:.3f}, fio {last.fio_cpu_s_per_gb:.3f}",
            flush=True,
        )
    ours.close()
    return results


def main() -> int:
    """Print and save; with --check, 1 where a target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--size", type=parse_size, default=2 << 30)
    parser.add_argument("--block", type=parse_size, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio is not installed: apt install fio", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        results = measure(Path(directory), given.size, given.block, given.depth, given.rounds)
    write_json(given.json, results)
    missed = [f"{r.pattern} reaches {r.ratio:.3f} of fio, {TARGET} is the target" for r in results if r.ratio < TARGET]
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
