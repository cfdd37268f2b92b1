"""Ours beside the field: the same model, tokens, dtype, threads and drive, in fresh processes, in turns.

    python benchmarks/peers.py [--peers PYTHON] [--rows 1 8 32] [--steps 5] [--rounds 2] [--throttle 500MB]
                               [--only TEXT ...] [--directory DIR] [--json FILE [--add]] [--markdown FILE]
                               [--plot FILE] [--check]

On a machine without a GPU: DeepSpeed ZeRO-3 on its CPU accelerator (Infinity: parameters and optimizer on NVMe;
Offload: in host memory), plain PyTorch in memory, and ours with everything on disk, with 16-bit weights in host memory,
with everything there, and with whatever our planner makes of the memory that ZeRO-Infinity took. A 128M-parameter
Llama, rows of 256 tokens, bfloat16 with fp32 masters, clipping at 1. The others run with recomputation and without. The
peers' environment is made by pip where `--peers` does not give the interpreter of one. The drive is throttled through
cgroup v1 where that can be written. A system that fails is shown as failed. `--add` keeps what the JSON file holds of
other batches; `--only` runs the systems whose name holds one of these texts.
benchmarks/largest.py compares the largest models.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ending import exit_code, parser_of, write_json
from matplotlib import pyplot
from peer_environment import interpreter
from throttle import throttled
from workers import HERE, measure

from spillway.spec.sizes import format_size, parse_size

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
LENGTH = 256
PARAMS = 128_049_152
STORE, MEMORY = "STORE", "MEMORY"  # stand for a directory of each run's own, and for the bytes ZeRO-Infinity took
STEP_LIMIT = 180  # seconds
KEEPING = ", keeping activations"
SAME_MEMORY = "spillway, in the memory of ZeRO-Infinity"
# Ours over theirs, and by how much: with the drive throttled, and at full speed.
TARGETS = (
    ("spillway, disk", "ZeRO-Infinity", 2.5, 1.5),
    ("spillway 8-bit, disk", "ZeRO-Infinity", 5.0, 2.5),
    ("spillway 8-bit and 24-bit masters, disk", "ZeRO-Infinity", 5.0, 2.5),
    ("spillway, states on disk", "ZeRO-Infinity", 2.5, 1.5),
    ("spillway 8-bit and 24-bit masters, states on disk", "ZeRO-Infinity", 5.0, 2.5),
    (SAME_MEMORY, "ZeRO-Infinity", 2.5, 1.5),
    ("spillway, memory", "ZeRO-Offload", 0.0, 1.5),
    ("spillway, memory", "ZeRO-Offload" + KEEPING, 0.0, 1.5),
    ("spillway, memory", "plain PyTorch", 0.0, 0.95),
    ("spillway, memory", "plain PyTorch" + KEEPING, 0.0, 0.95),
)


@dataclass(frozen=True)
class Result:
    """One system in one case; medians over rounds and steps, the first step of each left out. Per parameter and step:
    bytes read and written."""

    system: str
    rows: int
    throttle: int
    step_seconds: float
    tokens_per_s: float
    read_per_param: float
    written_per_param: float
    peak_bytes: int
    last_loss: float
    steps: int  # that `last_loss` is of the last of
    failure: str = ""


def commands(model: Path, store: str, rows: int, steps: int, peers: str) -> dict[str, list[str]]:
    """The command line of each system."""
    shape = [str(rows), str(LENGTH), str(steps)]

    def ours(place: str, moments: str, memory: str = "") -> list[str]:
        return [sys.executable, str(HERE / "spillway_worker.py"), str(model), store, *shape, place, moments, memory]

    def theirs(place: str, activations: str) -> list[str]:
        return [peers, str(HERE / "deepspeed_worker.py"), str(model), store, *shape, place, activations]

    def plain(activations: str) -> list[str]:
        return [sys.executable, str(HERE / "plain_worker.py"), str(model), *shape, activations]

    return {
        "ZeRO-Infinity": theirs("nvme", "recompute"),
        SAME_MEMORY: ours("auto", "float32", MEMORY),
        "ZeRO-Infinity" + KEEPING: theirs("nvme", "keep"),
        "ZeRO-Offload": theirs("cpu", "recompute"),
        "ZeRO-Offload" + KEEPING: theirs("cpu", "keep"),
        "spillway, disk": ours("disk", "float32"),
        "spillway 8-bit, disk": ours("disk", "8bit"),
        "spillway 8-bit and 24-bit masters, disk": ours("disk", "8bit-24"),
        "spillway, states on disk": ours("host,disk", "float32"),
        "spillway 8-bit and 24-bit masters, states on disk": ours("host,disk", "8bit-24"),
        "spillway, memory": ours("auto", "float32"),
        "plain PyTorch": plain("recompute"),
        "plain PyTorch" + KEEPING: plain("keep"),
    }


def uses_disk(system: str) -> bool:
    """Whether throttling the drive says anything about it."""
    return "disk" in system or "Infinity" in system


def main() -> int:
    """Run everything, print and save the table; with --check, 1 where a target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--throttle", type=parse_size, default=500_000_000)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    given.peers = given.peers or interpreter()
    results = measured_before(given.json, given.rows) if given.add else []
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        subprocess.run([sys.executable, str(DEMO), directory], check=True, capture_output=True)
        model = Path(directory) / "llama-128m"
        for rows in given.rows:
            for throttle in (0, given.throttle):
                results += case(Path(directory), model, rows, throttle, given)
                write_json(given.json, results)
    results.sort(key=lambda result: (result.rows, result.throttle))
    table = markdown(results)
    print(table)
    if given.plot:
        plot(results, given.plot)
    if given.markdown:
        given.markdown.write_text(table)
    missed = list(misses(results))
    return exit_code(given.check, missed)


def case(directory: Path, model: Path, rows: int, throttle: int, given: argparse.Namespace) -> list[Result]:
    """All systems with one batch and one drive speed, in turns."""
    steps: dict[str, list[dict[str, float]]] = {}
    failures: dict[str, str] = {}
    with throttled(directory, throttle) as enter:
        if enter is None:
            print("the drive cannot be throttled here")
            return []
        for _ in range(given.rounds):
            for system, command in commands(model, STORE, rows, given.steps, given.peers).items():
                is_meant = any(text in system for text in given.only) and (uses_disk(system) or not throttle)
                if not is_meant or system in failures:
                    continue
                taken = max((row["peak"] for row in steps.get("ZeRO-Infinity", [])), default=0)
                if MEMORY in command and not taken:
                    continue  # it failed
                with tempfile.TemporaryDirectory(dir=directory) as store:
                    meant = {STORE: store, MEMORY: str(int(taken))}
                    found = measure([meant.get(part, part) for part in command], enter, STEP_LIMIT * given.steps)
                if isinstance(found, str):
                    failures[system] = found
                else:
                    steps.setdefault(system, []).extend(found[1:])
                print(f"{system}, {rows} rows, {throttle or 'full speed'}: {failures.get(system, 'done')}", flush=True)
    results = [Result(system, rows, throttle, 0, 0, 0, 0, 0, 0, 0, why) for system, why in failures.items()]
    for system, rows_of in steps.items():
        seconds = statistics.median(row["seconds"] for row in rows_of)
        results.append(
            Result(
                system,
                rows,
                throttle,
                seconds,
                rows * LENGTH / seconds,
                statistics.median(row["read"] for row in rows_of) / PARAMS,
                statistics.median(row["written"] for row in rows_of) / PARAMS,
                int(max(row["peak"] for row in rows_of)),
                rows_of[-1]["loss"],
                given.steps,
            )
        )
    return results


def measured_before(file: Path | None, rows: list[int]) -> list[Result]:
    """What the file holds of other batches than these."""
    if file is None or not file.exists():
        return []
    return [result for row in json.loads(file.read_text()) if (result := Result(**row)).rows not in rows]


def plot(results: list[Result], file: Path) -> None:
    """Tokens per second of every system, a panel for each batch and drive."""
    figure, panels = pyplot.subplots(2, len({r.rows for r in results}), figsize=(14, 7), squeeze=False)
    for column, rows in enumerate(sorted({r.rows for r in results})):
        for line, throttled_too in enumerate((False, True)):
            shown = [r for r in results if r.rows == rows and bool(r.throttle) == throttled_too and not r.failure]
            shown.sort(key=lambda r: r.tokens_per_s)
            panel = panels[line][column]
            colours = ["tab:blue" if "spillway" in r.system else "tab:gray" for r in shown]
            bars = panel.barh([r.system for r in shown], [r.tokens_per_s for r in shown], color=colours)
            panel.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
            panel.margins(x=0.15)
            panel.tick_params(labelsize=7)
            drive = f"{format_size(shown[0].throttle)}/s" if throttled_too and shown else "full speed"
            panel.set_title(f"{rows} x {LENGTH} tokens, {drive}", fontsize=9)
            panel.set_xlabel("tokens/s", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def markdown(results: list[Result]) -> str:
    """The table."""
    lines = [
        "| rows x 256 | drive | system | s a step | tokens/s | read, B/param | written, B/param | peak host "
        "| loss (after steps) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        drive = f"{format_size(r.throttle)}/s" if r.throttle else "full speed"
        if r.failure:
            lines.append(f"| {r.rows} | {drive} | {r.system} | failed: {r.failure} | | | | | |")
        else:
            figures = (
                f"{r.step_seconds:.2f} | {r.tokens_per_s:.0f} | {r.read_per_param:.1f} | {r.written_per_param:.1f}"
            )
            peak = format_size(r.peak_bytes)
            lines.append(f"| {r.rows} | {drive} | {r.system} | {figures} | {peak} | {r.last_loss:.3f} ({r.steps}) |")
    return "\n".join(lines) + "\n"


def misses(results: list[Result]) -> list[str]:
    """Targets that were not reached, and runs of ours that failed."""
    own = {ours for ours, *_ in TARGETS}
    found = [f"{r.system} with {r.rows} rows failed: {r.failure}" for r in results if r.failure and r.system in own]
    speed = {(r.system, r.rows, r.throttle): r.tokens_per_s for r in results if not r.failure}
    for (system, rows, throttle), mine in speed.items():
        for ours, theirs, slow, full in TARGETS:
            target, other = slow if throttle else full, speed.get((theirs, rows, throttle))
            if system == ours and target and other and mine / other < target:
                found.append(f"{ours} is {mine / other:.2f} times {theirs} with {rows} rows, {target} is the target")
    return found


if __name__ == "__main__":
    sys.exit(main())
