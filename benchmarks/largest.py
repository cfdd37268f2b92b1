"""The largest model that trains within some host memory and disk: ours and the peers'.

    python benchmarks/largest.py [--host 6GB] [--disk 60GB] [--peers PYTHON] [--only TEXT] [--directory DIR]
                                 [--json FILE] [--markdown FILE] [--check]

Llamas of a ladder of sizes, a step of 1 x 256 tokens each, in a fresh process under a hard memory limit (cgroup v1,
which takes root). A size counts where the step ends and the store never took more than the disk allows. The peers with
as few and as small buffers as a matrix of the model allows, and with recomputation; ours with the plan it makes from
the two budgets. The models' files are full of zeros that take no room; what a step moves and computes is the same.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ending import exit_code, parser_of, write_json
from memory import make_cgroup
from peer_environment import interpreter
from shapes import Shape, make
from workers import HERE, measure

from spillway.spec.sizes import format_size, parse_size

LADDER = (0.13, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1, 1.25, 1.6, 2, 2.5, 3.2, 4, 4.5, 5, 6.3, 8, 9, 10, 11, 12.5)
STEP_LIMIT = 1200  # seconds for loading and one step
OURS, OURS_NARROW, INFINITY = "spillway", "spillway, 8-bit states and 24-bit masters", "ZeRO-Infinity"


@dataclass(frozen=True)
class Largest:
    """The largest size at which one system trained, and why the next one did not. Bytes and seconds of that step."""

    system: str
    params: int
    seconds: float
    host_bytes: int
    disk_bytes: int
    next_params: int
    why_not_next: str


def commands(model: str, store: str, host: int, disk: int, peers: str) -> dict[str, list[str]]:
    """The command line of each system: one step of 1 x 256 tokens."""
    shape = ["1", "256", "1"]
    deepspeed = [peers, str(HERE / "deepspeed_worker.py"), model, store, *shape]
    ours = [sys.executable, str(HERE / "spillway_worker.py"), model, store, *shape, "auto"]
    return {
        "plain PyTorch": [sys.executable, str(HERE / "plain_worker.py"), model, *shape, "recompute"],
        "ZeRO-Offload": [*deepspeed, "cpu", "recompute", "tight"],
        INFINITY: [*deepspeed, "nvme", "recompute", "tight"],
        OURS: [*ours, "float32", str(host), str(disk)],
        OURS_NARROW: [*ours, "8bit-24", str(host), str(disk)],
    }


@contextmanager
def watching(directory: Path) -> Iterator[Callable[[], int]]:
    """How many bytes the files under it took at most, as the file system counts them."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(1.0):
            most[0] = max(most[0], _bytes_under(directory))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield lambda: max(most[0], _bytes_under(directory))
    finally:
        over.set()
        watcher.join()


def _bytes_under(directory: Path) -> int:
    found = 0
    for place, _, files in os.walk(directory):
        for file in files:
            try:
                found += os.stat(Path(place) / file).st_blocks * 512
            except FileNotFoundError:
                continue
    return found


def attempt(directory: Path, system: str, size: float, host: int, disk: int, peers: str) -> Largest | tuple[int, str]:
    """One step at one size: what it took, or the size and why it does not train."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        model, store = Path(place) / "model", Path(place) / "store"
        store.mkdir()
        params = make(model, Shape.near(size * 1e9))
        group = make_cgroup(host)

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        command = commands(str(model), str(store), host, disk, peers)[system]
        with watching(store) as disk_peak:
            found = measure(command, enter, STEP_LIMIT)
            taken = disk_peak()
        if group is not None:
            group.rmdir()
    if isinstance(found, str):
        return params, "killed: out of host memory" if found == "killed by signal 9" else found
    if taken > disk:
        return params, f"took {format_size(taken)} of disk"
    return Largest(system, params, found[0]["seconds"], int(found[0]["peak"]), taken, 0, "")


def find(directory: Path, system: str, host: int, disk: int, peers: str) -> Largest:
    """The peers go up the ladder to the first size that fails; ours go down it to the first that trains, because a plan
    that does not fit is refused within seconds."""
    is_ours = system in (OURS, OURS_NARROW)
    best, short = Largest(system, 0, 0.0, 0, 0, 0, ""), (0, "the ladder ends here")
    for size in reversed(LADDER) if is_ours else LADDER:
        outcome = attempt(directory, system, size, host, disk, peers)
        failed = isinstance(outcome, tuple)
        print(f"{system}, {size}B: {outcome[1] if isinstance(outcome, tuple) else 'trained'}", flush=True)
        if isinstance(outcome, tuple):
            short = outcome
        else:
            best = outcome
        if failed != is_ours:
            break
    return Largest(system, best.params, best.seconds, best.host_bytes, best.disk_bytes, *short)


def markdown(results: list[Largest]) -> str:
    """The table."""
    lines = [
        "| system | largest that trains (parameters) | a step | host | disk | the next size up |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        taken = (
            f"{r.seconds:.0f} s | {format_size(r.host_bytes)} | {format_size(r.disk_bytes)}" if r.params else " | | "
        )
        upward = f"{r.next_params / 1e9:.2f} billion: {r.why_not_next}"
        lines.append(f"| {r.system} | {r.params / 1e9:.2f} billion | {taken} | {upward} |")
    return "\n".join(lines) + "\n"


def misses(results: list[Largest]) -> list[str]:
    """Where a peer trains more than ours."""
    params = {r.system: r.params for r in results}
    ours = params.get(OURS, 0)
    theirs = {name: count for name, count in params.items() if name not in (OURS, OURS_NARROW)}
    if OURS in params and not ours:
        return ["ours trains nothing"]
    return [f"{name} trains {count:,} parameters, ours {ours:,}" for name, count in theirs.items() if 0 < ours < count]


def main() -> int:
    """Find them all; with --check, 1 where a peer's is larger than ours."""
    parser = parser_of(__doc__)
    parser.add_argument("--host", type=parse_size, default=parse_size("6GB"))
    parser.add_argument("--disk", type=parse_size, default=parse_size("60GB"))
    parser.add_argument("--peers", metavar="PYTHON", help="made by pip where it is not given")
    parser.add_argument("--only", default="", help="systems whose name holds this")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    if (probe := make_cgroup(given.host)) is None:
        return exit_code(given.check, ["nothing was measured: without cgroup v1 (it takes root) memory has no limit"])
    probe.rmdir()
    peers = given.peers or interpreter()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        systems = [name for name in commands("", "", 0, 0, peers) if given.only in name]
        results = [find(Path(directory), name, given.host, given.disk, peers) for name in systems]
    table = markdown(results)
    print(table)
    write_json(given.json, results)
    if given.markdown:
        given.markdown.write_text(table)
    missed = misses(results)
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
