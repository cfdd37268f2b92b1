"""On a GPU: share of what the GPU can do, ours beside the field, and what each choice of the plan is worth.

    python benchmarks/gpu.py PART ... [--device-memory 24GB] [--host-memory 64GB] [--disk-memory 58GB]
                             [--directory DIR] [--minutes 8.5] [--only TEXT ...] [--deepspeed PYTHON]
                             [--out benchmarks/results] [--check]

Parts, each within --minutes:
    1b 8b 13b 30b   ours at several numbers of rows of 1,024 tokens, beside the ideal: forward and backward of two
                    depths wholly on the device, extrapolated to all layers (all but 1b in 100 GB of host memory; 13b
                    and 30b unclipped, for then no gradient waits; 30b with 8-bit states and 24-bit masters)
    peers-1b peers-8b   ours, DeepSpeed ZeRO-Offload and ZeRO-Infinity, at equal rows and micro-batches
    more-peers-1b more-peers-8b   ours, FSDP2 with CPU offload, torchao's CPUOffloadOptimizer, plain PyTorch. At 8b a
                    peer that keeps fp32 weights, gradients and moments wants 128 GB of host memory or of disk
    ladder          the update modes on disk: serial, overlap-naive, overlap, deferred, auto
    activations     recompute, tape, keep, host, auto
    swapped         more and more activations moved off the device instead of being computed again (LoHan's curve)
    streams         1, 2 and 4 micro-batches side by side, of 1, 2 and 8 rows each
    smoke           a tiny model through every worker, for a machine without a GPU too (--device cpu)

Random weights are made on the device: nothing is downloaded. Every case is a fresh process; one that fails or takes too
long is shown as such, with its last words; `--only` runs the cases of a part whose label holds one of these texts, in
all of its time, and keeps what the file has of the others (peers-8b needs that where making 8 billion weights takes
minutes). Results are written after every case to OUT/gpu-PART.json. `--deepspeed` is
the interpreter of an environment that has it (by default this one). Targets (--check): at 8b 0.90 of the ideal, 2.3x
ZeRO-Offload and 3.5x ZeRO-Infinity at equal rows; 13b and 30b train at all.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from ending import exit_code, parser_of, write_json

from spillway.spec.sizes import format_size, parse_size

WORKERS = Path(__file__).parent / "gpu_workers"
sys.path.insert(0, str(WORKERS))
from gpu_common import LENGTH, SWAPPED, WIDTHS, flops_per_token  # noqa: E402

IDEAL_TARGET = 0.90
PEER_TARGETS = {"ZeRO-Offload": 2.3, "ZeRO-Infinity": 3.5}
_SCRIPTS = {"ours": "ours.py", "ZeRO-Offload": "zero_worker.py", "ZeRO-Infinity": "zero_worker.py"}
_GIVEN_UP = 1.5  # of the seconds a case was given: making the model and the plan count, too


@dataclass(frozen=True)
class Case:
    """One process. `label` tells cases of a part apart; `options` go to spillway.prepare."""

    label: str
    system: str
    shape: str
    rows: int
    micro: int | None = None
    moments: str = "float32"
    master_bits: int = 32
    clip: float | None = 1.0
    layers: int | None = None
    host_memory: str | None = None
    swapped: int | None = None  # point of the curve of so many activations, of SWAPPED
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Medians over the steps after the first two; bytes are peaks; FLOP/s count no recomputation."""

    case: Case
    error: str
    step_seconds: float = 0.0
    tokens_per_s: float = 0.0
    model_flops_per_s: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def _ideal(shape: str, micro: int) -> Iterator[Case]:
    """Two depths; what they differ by is what a layer takes."""
    for layers in (2, 4):
        yield Case(f"ideal, {layers} layers", "ideal", shape, micro, micro, layers=layers)


def _own(shape: str, micro: int, rows: tuple[int, ...], **more: Any) -> Iterator[Case]:
    yield from _ideal(shape, micro)
    for count in rows:
        yield Case(f"ours, {count} rows", "ours", shape, count, micro, **more)


def _peers(shape: str, rows: int, micro: int) -> Iterator[Case]:
    for system in ("ours", "ZeRO-Offload", "ZeRO-Infinity"):
        yield Case(system, system, shape, rows, micro)
    yield Case("ours, 8-bit states", "ours", shape, rows, micro, "8bit")


def _more_peers(shape: str, rows: int, micro: int) -> Iterator[Case]:
    yield Case("ours", "ours", shape, rows, micro)
    for system in ("fsdp2", "torchao", "plain"):
        yield Case("torchao, unclipped" if system == "torchao" else system, system, shape, rows, micro)


def _ladder(shape: str, rows: int, micro: int) -> Iterator[Case]:
    on_disk = {"states": "disk"}
    for mode in ("serial", "overlap-naive", "overlap", "deferred", "auto"):
        yield Case(mode, "ours", shape, rows, micro, clip=None, options={"update": mode, **on_disk})


def _kept(shape: str, rows: int, micro: int) -> Iterator[Case]:
    for activations in ("recompute", "tape", "keep", "host", "auto"):
        yield Case(activations, "ours", shape, rows, micro, options={"activations": activations})


def _swapped(shape: str, rows: int, micro: int) -> Iterator[Case]:
    for point in range(SWAPPED):
        yield Case(f"swapped {point} of {SWAPPED - 1}", "ours", shape, rows, micro, swapped=point)


def _streams(shape: str, rows: int) -> Iterator[Case]:
    for micro in (1, 2, 8):
        for streams in (1, 2, 4):
            label = f"{micro} rows x {streams} streams"
            yield Case(label, "ours", shape, rows, micro, options={"streams": streams})


def _smoke() -> Iterator[Case]:
    yield from _ideal("tiny", 2)
    yield from _peers("tiny", 4, 2)
    yield from _more_peers("tiny", 4, 2)
    yield Case("swapped", "ours", "tiny", 4, 2, swapped=SWAPPED - 1)


PARTS = {
    "1b": lambda: list(_own("1b", 8, (16, 64, 128))),
    "8b": lambda: list(_own("8b", 8, (32, 64, 128), host_memory="100GB")),
    "13b": lambda: list(_own("13b", 4, (16, 32), clip=None, host_memory="100GB")),
    "30b": lambda: list(_own("30b", 4, (4,), moments="8bit", master_bits=24, clip=None, host_memory="100GB")),
    "peers-1b": lambda: list(_peers("1b", 32, 8)),
    "peers-8b": lambda: list(_peers("8b", 64, 8)),
    "more-peers-1b": lambda: list(_more_peers("1b", 32, 8)),
    "more-peers-8b": lambda: list(_more_peers("8b", 64, 8)),
    "ladder": lambda: list(_ladder("1b", 64, 8)),
    "activations": lambda: list(_kept("1b", 64, 8)),
    "swapped": lambda: list(_swapped("1b", 64, 8)),
    "streams": lambda: list(_streams("1b", 32)),
    "smoke": lambda: list(_smoke()),
}


def run(case: Case, seconds: float, given: argparse.Namespace) -> Result:
    """One case in a process of its own."""
    store = given.directory / "gpu-store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    memory = {"host_memory": case.host_memory or given.host_memory, "disk_memory": given.disk_memory}
    if given.device == "cuda":
        memory["device_memory"] = given.device_memory
    asked = {
        "shape": case.shape, "rows": case.rows, "micro": case.micro, "moments": case.moments,
        "master_bits": case.master_bits, "clip": case.clip,
        "layers": case.layers, "swapped": case.swapped, "how": case.system, "device": given.device, "store": str(store),
        "seconds": 0.6 * seconds, "device_bytes": parse_size(given.device_memory),
        "options": {**memory, **case.options},
    }  # fmt: skip
    python = given.deepspeed if case.system.startswith("ZeRO") else sys.executable
    command = [python, str(WORKERS / _SCRIPTS.get(case.system, "torch_worker.py")), json.dumps(asked)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if given.device == "cpu":
        environment |= {"LENGTH": "64", "DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as child:
        try:
            said, _ = child.communicate(timeout=_GIVEN_UP * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
            said += f"\nnot done after {_GIVEN_UP * seconds:.0f} s"
    shutil.rmtree(store, ignore_errors=True)
    return _result(case, said, child.returncode, given)


def _result(case: Case, said: str, code: int, given: argparse.Namespace) -> Result:
    found = [json.loads(line) for line in said.splitlines() if line.startswith(('{"seconds"', '{"facts"'))]
    steps = [line for line in found if "seconds" in line]
    facts: dict[str, Any] = next((line["facts"] for line in found if "facts" in line), {})
    error = "" if code == 0 else (said.strip().splitlines() or ["it said nothing"])[-1][-300:]
    if len(steps) < 3:
        return Result(case, error or "fewer than three steps", losses=[step["loss"] for step in steps])
    seconds = statistics.median(step["seconds"] for step in steps[2:])
    tokens = case.rows * (LENGTH if given.device == "cuda" else 64)
    return Result(
        case,
        error,
        seconds,
        tokens / seconds,
        tokens * flops_per_token(case.shape) / seconds,
        max(step["device"] for step in steps),
        max(step["host"] for step in steps),
        [step["loss"] for step in steps],
        facts,
    )


def ideal_seconds(results: list[Result], rows: int) -> float | None:
    """Of forward and backward of the whole model at so many rows, from the two depths."""
    depths = [result for result in results if result.case.system == "ideal" and result.step_seconds]
    if len(depths) < 2:
        return None
    few, more = depths[0], depths[1]
    layer = (more.step_seconds - few.step_seconds) / ((more.case.layers or 0) - (few.case.layers or 0))
    whole = few.step_seconds + layer * (WIDTHS[few.case.shape][2] - (few.case.layers or 0))
    return whole * rows / few.case.rows


def say(part: str, results: list[Result]) -> None:
    """A row per case."""
    print(f"\n{part}")
    for result in results:
        head = f"  {result.case.label:22}"
        if not result.step_seconds:
            print(f"{head} failed: {result.error}")
            continue
        line = (
            f"{head} {result.step_seconds:8.2f} s  {result.tokens_per_s:9,.0f} tokens/s  "
            f"{result.model_flops_per_s / 1e12:6.1f} TFLOP/s  device {format_size(result.device_bytes)}  "
            f"host {format_size(result.host_bytes)}"
        )
        ideal = ideal_seconds(results, result.case.rows)
        if ideal is not None and result.case.system == "ours":
            line += f"  {ideal / result.step_seconds:.2f} of the ideal"
        if result.facts:
            line += f"  predicted {result.facts['predicted_seconds']:.2f} s, {result.facts['bottleneck']}"
        print(line, flush=True)


def misses(part: str, results: list[Result]) -> list[str]:
    """Targets that were not reached."""
    found = []
    own = [result for result in results if result.case.system == "ours"]
    if part in ("13b", "30b", "smoke") and not any(result.step_seconds for result in own):
        found.append(f"{part}: ours did not train")
    if part == "8b":
        shares = [
            ideal / result.step_seconds
            for result in own
            if result.step_seconds and (ideal := ideal_seconds(results, result.case.rows))
        ]
        if not shares or max(shares) < IDEAL_TARGET:
            found.append(f"8b: {max(shares, default=0.0):.2f} of the ideal, not {IDEAL_TARGET}")
    if part == "peers-8b":
        by_label = {result.case.label: result for result in results}
        ours = by_label.get("ours")
        if ours is None:
            return ["8b: ours was not measured"]
        for peer, target in PEER_TARGETS.items():
            if peer not in by_label:
                found.append(f"8b: {peer} was not measured")
                continue
            failed = [result for result in (ours, by_label[peer]) if not result.step_seconds]
            if failed:
                found.append(f"8b: not compared with {peer}, {failed[0].case.label} failed: {failed[0].error}")
            elif by_label[peer].step_seconds < target * ours.step_seconds:
                found.append(f"8b: {by_label[peer].step_seconds / ours.step_seconds:.2f}x {peer}, not {target}")
    return found


def machine(given: argparse.Namespace) -> dict[str, Any]:
    """What it was measured on, and under which limits."""
    return {
        "device": torch.cuda.get_device_name(0) if given.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device_memory": given.device_memory,
        "host_memory": given.host_memory,
        "disk_memory": given.disk_memory,
    }


def measured_before(file: Path, cases: list[Case]) -> list[Result]:
    """What the file holds of other cases than these."""
    if not file.exists():
        return []
    known = [Result(**{**row, "case": Case(**row["case"])}) for row in json.loads(file.read_text())["results"]]
    return [result for result in known if result.case not in cases]


def main() -> int:
    """Run the parts, print and save what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--device-memory", default="24GB")
    parser.add_argument("--host-memory", default="64GB")
    parser.add_argument("--disk-memory", default="58GB")
    parser.add_argument("--directory", type=Path, default=Path("gpu-benchmark"))
    parser.add_argument("--minutes", type=float, default=8.5, help="for each part")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--deepspeed", default=sys.executable)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    missed, everything = [], {}
    for part in given.parts:
        cases = [case for case in PARTS[part]() if any(text in case.label for text in given.only)]
        results, end = measured_before(given.out / f"gpu-{part}.json", cases), time.monotonic() + 60 * given.minutes
        for index, case in enumerate(cases):
            left = end - time.monotonic()
            results.append(run(case, max(left / (len(cases) - index) / _GIVEN_UP, 10.0), given))
            everything[part] = {"machine": machine(given), "results": [asdict(result) for result in results]}
            given.out.mkdir(parents=True, exist_ok=True)
            write_json(given.out / f"gpu-{part}.json", everything[part])
        say(part, results)
        missed += misses(part, results)
    write_json(given.json, everything)
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
