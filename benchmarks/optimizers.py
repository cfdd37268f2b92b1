"""Do narrower optimizer states train as well? The demo model, several seeds, exact AdamW beside the narrow ones.

    python benchmarks/optimizers.py [--steps 300] [--seeds 3] [--directory DIR] [--plot docs/optimizers.png]
                                    [--json FILE] [--check]

Every run starts from the same weights; the seed orders the data. Target: the loss of each narrow form, averaged over
the last fifty steps and the seeds, is within exact AdamW's spread from seed to seed. Needs matplotlib.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from ending import exit_code, parser_of, write_json

matplotlib.use("Agg")
from matplotlib import pyplot

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
FORMS = {
    "adamw": ["--optim", "adamw"],
    "adamw_bf16": ["--optim", "adamw_bf16"],
    "adamw_8bit": ["--optim", "adamw_8bit"],
    "adamw_8bit, 24-bit masters": ["--optim", "adamw_8bit", "--master-bits", "24"],
}
EXACT = "adamw"
_LAST = 50


@dataclass(frozen=True)
class Curve:
    """The losses of one run."""

    form: str
    seed: int
    losses: list[float]

    @property
    def end(self) -> float:
        """Mean of the last steps."""
        return statistics.fmean(self.losses[-_LAST:])


def train(directory: Path, form: str, seed: int, steps: int) -> Curve:
    """One run in a child process."""
    out = Path(tempfile.mkdtemp(prefix="run-", dir=directory)) / "run"
    command = [
        sys.executable,
        "-m",
        "spillway",
        "train",
        str(directory / "llama-128m"),
        str(directory / "text"),
    ]
    command += ["-o", str(out), "--max-length", "64", "--per-device-train-batch-size", "1", "--learning-rate", "3e-4"]
    command += ["--max-steps", str(steps), "--seed", str(seed), "--save-steps", "100000", *FORMS[form]]
    subprocess.run(command, check=True, capture_output=True)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    subprocess.run(["rm", "-rf", str(out.parent)], check=True)
    return Curve(form, seed, [json.loads(line)["loss"] for line in lines])


def smooth(losses: list[float], window: int = 25) -> list[float]:
    """A running mean."""
    return [statistics.fmean(losses[max(0, index - window + 1) : index + 1]) for index in range(len(losses))]


def plot(curves: list[Curve], file: Path) -> None:
    """The band of exact AdamW's seeds, and the mean of each form; below, each form's difference from exact."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    seeds = sorted({curve.seed for curve in curves})
    lines = {form: [smooth(c.losses) for c in curves if c.form == form] for form in FORMS}
    exact = [sum(values) / len(values) for values in zip(*lines[EXACT], strict=True)]
    steps = range(1, len(exact) + 1)
    low, high = (list(map(pick, zip(*lines[EXACT], strict=True))) for pick in (min, max))
    above.fill_between(steps, low, high, alpha=0.25, label=f"adamw, {len(seeds)} seeds: lowest to highest")
    below.fill_between(
        steps,
        [a - b for a, b in zip(low, exact, strict=True)],
        [a - b for a, b in zip(high, exact, strict=True)],
        alpha=0.25,
    )
    for form, runs in lines.items():
        mean = [sum(values) / len(values) for values in zip(*runs, strict=True)]
        above.plot(steps, mean, label=form, linewidth=1.2)
        below.plot(steps, [a - b for a, b in zip(mean, exact, strict=True)], linewidth=1.2)
    above.set_ylabel("loss, mean of 25 steps")
    above.legend()
    below.set_ylabel("difference from adamw")
    below.set_xlabel("step")
    figure.suptitle("128M-parameter Llama, 64 tokens a step, the same start")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> int:
    """Train, plot, print; with --check, 1 where a form leaves exact AdamW's spread."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        subprocess.run([sys.executable, str(DEMO), directory], check=True)
        for seed in range(given.seeds):
            for form in FORMS:
                curves.append(train(Path(directory), form, seed, given.steps))
                print(f"seed {seed}, {form}: {curves[-1].losses[0]:.4f} -> {curves[-1].end:.4f}", flush=True)
    ends = {form: [curve.end for curve in curves if curve.form == form] for form in FORMS}
    spread = max(ends[EXACT]) - min(ends[EXACT])
    print(f"adamw: {statistics.fmean(ends[EXACT]):.4f}, from seed to seed {spread:.4f}")
    missed = []
    for form in [form for form in FORMS if form != EXACT]:
        off = statistics.fmean(ends[form]) - statistics.fmean(ends[EXACT])
        print(f"{form}: {statistics.fmean(ends[form]):.4f}, {off:+.4f} from adamw")
        if abs(off) > spread:
            missed.append(f"{form} is {off:+.4f} from exact AdamW, whose seeds differ by {spread:.4f}")
    if given.plot:
        plot(curves, given.plot)
    write_json(given.json, curves)
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
