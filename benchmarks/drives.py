"""Two drives of different speeds under one store: is each used for what it gives?

    python benchmarks/drives.py [--rates 800MB 200MB] [--size 1GiB] [--directory DIR] [--json FILE] [--check]

Two file systems on loop devices, throttled through cgroup v1 to different rates each way (as root; without that nothing
is measured, and it says so). A store is striped over them by the shares that its probe finds, and once evenly. Target:
by shares, reading and writing at least 0.9 of what both drives give together.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ending import exit_code, parser_of, write_json
from throttle import throttled_each

from spillway.hardware.bandwidth import measure_shares
from spillway.native import DiskEngine
from spillway.spec.sizes import format_size, parse_size
from spillway.store.arena import Arena
from spillway.store.disk import Extent, Geometry, StripedDisk

TARGET = 0.9
_WORKER = "--worker"


@dataclass(frozen=True)
class Result:
    """Bytes per second over both drives, by the shares that were found and by even ones."""

    rates: tuple[int, ...]
    shares: tuple[int, ...]
    read: float
    write: float
    even_read: float
    even_write: float


@contextmanager
def mounted(directory: Path, number: int, num_bytes: int) -> Iterator[Path]:
    """A file system of its own on a loop device. Raises CalledProcessError where that is not allowed."""
    image, point = directory / f"drive-{number}.image", directory / f"drive-{number}"
    with open(image, "wb") as file:
        file.truncate(num_bytes)
    point.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def measure(paths: list[Path], num_bytes: int) -> None:
    """What the child does under its throttle: print rates as JSON."""
    shares = measure_shares(tuple(paths))
    found: dict[str, float | tuple[int, ...]] = {"shares": shares}
    for name, chosen in (("", shares), ("even_", (1,) * len(paths))):
        disk = StripedDisk(Geometry(tuple(map(str, paths)), chosen), keep=False)
        engine, buffer = DiskEngine(), Arena(num_bytes).buffer
        buffer.fill_(1)
        move = (Extent(0, num_bytes), buffer)
        disk.reserve(num_bytes)
        disk.write_all(engine, [move])  # the first time over a file's blocks is another matter
        for verb, run in (("write", disk.write_all), ("read", disk.read_all)):
            start = time.perf_counter()
            run(engine, [move])
            found[name + verb] = num_bytes / (time.perf_counter() - start)
        engine.close()
        disk.close()
    print(json.dumps(found))


def run(directory: Path, rates: tuple[int, ...], num_bytes: int) -> Result | None:
    """Mount, throttle and measure; None where that cannot be had here."""
    with ExitStack() as stack:
        try:
            paths = [stack.enter_context(mounted(directory, index, 2 * num_bytes)) for index in range(len(rates))]
        except (OSError, subprocess.CalledProcessError):
            return None
        enter = stack.enter_context(throttled_each(dict(zip(paths, rates, strict=True))))
        if enter is None:
            return None
        command = [sys.executable, __file__, _WORKER, str(num_bytes), *map(str, paths)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter, check=True)
    return Result(rates=rates, **json.loads(done.stdout))


def main() -> int:
    """Run, print, and with --check fail where the target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--rates", type=parse_size, nargs="+", default=(parse_size("800MB"), parse_size("200MB")))
    parser.add_argument("--size", type=parse_size, default=parse_size("1GiB"))
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        result = run(Path(directory), tuple(options.rates), options.size)
    if result is None:
        return exit_code(options.check, ["nothing was measured: loop devices and cgroup v1 take root"])
    together = sum(result.rates)
    print(f"drives          {' and '.join(f'{format_size(rate)}/s' for rate in result.rates)}, each way")
    print(f"shares          {' : '.join(map(str, result.shares))}")
    for name, read, write in (
        ("by shares", result.read, result.write),
        ("evenly", result.even_read, result.even_write),
    ):
        print(f"{name:<15} read {format_size(int(read))}/s ({read / together:.2f} of both), "
              f"write {format_size(int(write))}/s ({write / together:.2f})")  # fmt: skip
    write_json(options.json, result)
    pairs = (("read", result.read), ("write", result.write))
    missed = [f"{verb}: {rate / together:.2f} of both drives" for verb, rate in pairs if rate < TARGET * together]
    return exit_code(options.check, missed)


if __name__ == "__main__":
    if sys.argv[1:2] == [_WORKER]:
        measure([Path(path) for path in sys.argv[3:]], int(sys.argv[2]))
        sys.exit(0)
    sys.exit(main())
