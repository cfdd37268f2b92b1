"""Where the time of a step goes, by update mode: is the lane that limits it busy all the time?

    python benchmarks/step.py [--steps 4] [--throttle 500MB] [--directory DIR] [--json FILE] [--check]

The demo's 128M-parameter Llama on the CPU, in fresh processes, exact clipping in force: with the drive throttled (as
root, through cgroup v1), with short rows in memory, and with long ones in memory. Modes: serial; overlap-naive
(each unit's read, update and write after those of the one before) and overlap (speculative, nothing clipped); deferred
(in the next forward); auto (what the planner mixes); and auto where every step is clipped.
Targets for auto: the limiting lane is busy at least 0.95 of the step, the step takes at most 1.1 times as long as the
busiest lane works, and no mode is faster by more than a tenth. Beside the ladder stand the papers' ratios, of 13B on a
GPU and 12 drives.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ending import exit_code, parser_of, write_json
from throttle import throttled

from spillway.spec.sizes import parse_size

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
MODES = ("serial", "overlap-naive", "overlap", "deferred", "auto", "auto, clipped")
BUSY_TARGET, LANE_TARGET, BEST_TARGET = 0.95, 1.1, 1.1
PAPERS = {
    "overlap-naive": "LoHan: 1.09x",  # 1.33 over serial is 1.22 over naive
    "overlap": "LoHan: 1.33x at batch 64; Fuyou: 1.09 to 1.38x",
}
_WARM_UP = 5  # speculation begins after three steps that were not clipped, with one flush


@dataclass(frozen=True)
class Case:
    """What limits it; rows of so many tokens; where weights and states rest; the lanes that ought to be busy."""

    name: str
    rows: int
    length: int
    place: str
    slow_drive: bool
    lanes: tuple[str, ...]


CASES = (
    Case("disk", 1, 64, "disk", True, ("read", "write")),
    Case("update", 1, 32, "host", False, ("compute", "update")),
    Case("compute", 8, 256, "host", False, ("compute",)),
)


@dataclass(frozen=True)
class Result:
    """Seconds, median over the steps, and the share of the step for which each lane was busy."""

    case: str
    mode: str
    chosen: str  # the plan's mode
    step_seconds: float
    busy: dict[str, float]

    @property
    def over_busiest(self) -> float:
        """The step's time over that of the busiest lane."""
        return 1 / max(self.busy.values())


def work(model_directory: str, store: str, case: Case, mode: str, steps: int) -> None:
    """In a child: train, and print what each step took."""
    import torch
    from transformers import AutoModelForCausalLM

    import spillway
    from spillway.assembly import prepared

    limit = 1e-3 if "clipped" in mode else 1e6
    model = spillway.load(model_directory, AutoModelForCausalLM)
    model, optimizer = spillway.prepare(
        model,
        spillway.AdamW(lr=2e-5, max_grad_norm=limit),
        store=store,
        device="cpu",
        weights=case.place,
        states=case.place,
        update=mode.split(",")[0],
        activations="recompute",
    )
    source = torch.Generator().manual_seed(0)
    for step in range(_WARM_UP + steps):
        ids = torch.randint(0, 8000, (case.rows, case.length), generator=source)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        trace = optimizer.last_result.traces[-1]
        schedule = prepared(model).session.engine.schedule
        chosen = schedule.plan.placement.update if schedule is not None else ""
        if step >= _WARM_UP:
            print(json.dumps({"seconds": trace.seconds, "busy": trace.busy_s(), "chosen": chosen}), flush=True)


def run(case: Case, mode: str, directory: Path, given: argparse.Namespace) -> Result | None:
    """None where the drive cannot be throttled."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as store,
        throttled(directory, given.throttle if case.slow_drive else 0) as enter,
    ):
        if enter is None:
            return None
        arguments = [json.dumps(asdict(case)), mode, str(directory / "llama-128m"), store, str(given.steps)]
        command = [sys.executable, __file__, "--worker", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter)
    if done.returncode != 0:
        raise RuntimeError(f"{case.name}, {mode}: {done.stderr[-2000:]}")
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    seconds = statistics.median(step["seconds"] for step in steps)
    busy = {
        lane: statistics.median(step["busy"].get(lane, 0.0) / step["seconds"] for step in steps)
        for lane in ("compute", "update", "read", "write", "upload", "download")
    }
    return Result(case.name, mode, steps[-1]["chosen"], seconds, busy)


def misses(results: list[Result]) -> list[str]:
    """Targets that were not reached."""
    found = []
    for case in CASES:
        of_mode = {result.mode: result for result in results if result.case == case.name}
        if "auto" not in of_mode:
            continue
        auto, best = of_mode["auto"], min(of_mode.values(), key=lambda result: result.step_seconds)
        busiest = max(auto.busy[lane] for lane in case.lanes)
        if busiest < BUSY_TARGET:
            found.append(f"{case.name}: the busiest of {', '.join(case.lanes)} is busy {busiest:.0%} of the step")
        if auto.over_busiest > LANE_TARGET:
            found.append(f"{case.name}: the step takes {auto.over_busiest:.2f} times as long as the busiest lane works")
        if auto.step_seconds > BEST_TARGET * best.step_seconds:
            found.append(f"{case.name}: auto takes {auto.step_seconds:.2f} s, {best.mode} {best.step_seconds:.2f} s")
    return found


def main() -> int:
    """Print and save; with --check, 1 where a target is missed."""
    if sys.argv[1:2] == ["--worker"]:
        told, mode, model, store, steps = sys.argv[2:7]
        known = json.loads(told)
        work(model, store, Case(**{**known, "lanes": tuple(known["lanes"])}), mode, int(steps))
        return 0
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--throttle", type=parse_size, default=500_000_000)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    results: list[Result] = []
    missed = []
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        subprocess.run([sys.executable, str(DEMO), directory], check=True, capture_output=True)
        for case in CASES:
            serial = 0.0
            for mode in MODES:
                found = run(case, mode, Path(directory), given)
                if found is None:
                    missed.append(f"{case.name} was not measured: the drive cannot be throttled here")
                    break
                results.append(found)
                serial = serial or found.step_seconds
                paper = f", {PAPERS[mode]}" if mode in PAPERS else ""
                busy = ", ".join(f"{lane} {share:.0%}" for lane, share in found.busy.items() if share > 0.02)
                print(
                    f"{case.name:8} {mode:14} {found.chosen:9} {found.step_seconds:6.2f} s "
                    f"({serial / found.step_seconds:.2f}x serial{paper}; {found.over_busiest:.2f}x the busiest lane), "
                    f"busy: {busy}",
                    flush=True,
                )
    write_json(given.json, results)
    missed += misses(results)
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
