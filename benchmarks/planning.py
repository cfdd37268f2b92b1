"""How long does planning take?

    python benchmarks/planning.py [--repeats 5] [--json FILE] [--check]

GPT-13B (43 units) and GPT-175B (99 units of 1.8 billion parameters, each updated in 27 parts) on machines where the
drives, the GPU, the optimizer or nothing but memory are the bound. The target, 0.1 s, is that of a plan whose model was
built and profiled before. How long that takes is shown, too: building it and profiling a batch, and profiling a batch
of another shape, for which training waits whenever one comes.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from ending import exit_code, parser_of, write_json

from spillway.planning.question import Question, ask, asked
from spillway.report.progress import Reporter
from spillway.spec.options import TrainOptions

TARGET = 0.1  # seconds
Found = TypeVar("Found")


@dataclass(frozen=True)
class Case:
    """A model on a machine; `rows` of 1024 tokens a step."""

    name: str
    model: str
    hardware: str
    rows: int


CASES = (
    Case("13B, the drives are the bound", "gpt-13b", "rtx4090+2x990pro+128GB", 8),
    Case("13B, the GPU is the bound", "gpt-13b", "rtx4090+12x990pro+768GB", 32),
    Case("13B, all in memory", "gpt-13b", "h200+1500GB", 16),
    Case("175B, the optimizer is the bound", "gpt-175b", "rtx4090+12x990pro+768GB", 2),
    Case("175B, the drives are the bound", "gpt-175b", "a100-80+4x990pro+256GB", 8),
)


@dataclass(frozen=True)
class Result:
    """Seconds; of plans and profiles of another shape the fastest, which other work on the machine disturbs least, and
    of plans the median."""

    name: str
    units: int
    operations: int
    bottleneck: str
    fastest: float
    median: float
    first_profile: float
    profile: float


def question(case: Case, rows: int) -> Question:
    """What `spillway plan` would be asked."""
    options = TrainOptions(
        model=case.model,
        data=(),
        output_dir="",
        store=(".",),
        max_length=1024,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=rows,
    )
    return ask(options, case.hardware, Reporter())


def measure(case: Case, repeats: int) -> Result:
    """Profile and plan again and again."""
    first = question(case, case.rows)
    first_profile, profile = timed(first.profile)
    others = [
        asked(first, first.machine, replace(first.options, gradient_accumulation_steps=case.rows + more))
        for more in range(1, repeats + 1)
    ]
    profiles = [timed(other.profile)[0] for other in others]
    plan = first.plan(first.machine, profile)
    times = [timed(lambda: first.plan(first.machine, profile))[0] for _ in range(repeats)]
    return Result(
        case.name,
        len(profile.units),
        len(plan.ops),
        plan.bottleneck,
        min(times),
        statistics.median(times),
        first_profile,
        min(profiles),
    )


def timed(function: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds, and what it gave."""
    start = time.perf_counter()
    found = function()
    return time.perf_counter() - start, found


def main() -> int:
    """Print the table; with --check, 1 where a target is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    results = []
    for case in CASES:
        result = measure(case, given.repeats)
        results.append(result)
        print(
            f"{case.name:34} {case.hardware:24} {result.units} units, {result.operations} operations, "
            f"{result.bottleneck}: {1e3 * result.fastest:.0f} ms (median {1e3 * result.median:.0f}); "
            f"profile {result.first_profile:.2f} s, of another shape {result.profile:.2f} s",
            flush=True,
        )
    write_json(given.json, results)
    missed = [f"{r.name}: {1e3 * r.fastest:.0f} ms" for r in results if r.fastest > TARGET]
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
