"""Long runs of the crash test: a tiny model is trained and killed with SIGKILL at random instants, over and over.

    python benchmarks/crash.py [--kills 200] [--seed 0] [--directory DIR] [--json FILE] [--check]

Needs the tests' extra (`pip install .[test]`). A run passes when every training that came to its end has the losses
and the weights of the one that was not killed, bit for bit.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ending import exit_code, parser_of, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import directories
import killing


@dataclass(frozen=True)
class Result:
    """Of one placement of the states."""

    place: str
    kills: int
    runs: int
    different: int
    seconds_uninterrupted: float


def crash(place: str, kills: int, seed: int, directory: Path) -> Result:
    """Kill until `kills` have hit, and compare every run that ends."""
    model = directories.make_model(directory / f"llama-{place}")
    data = directories.make_texts(directory / f"texts-{place}.jsonl")

    def command(run: Path) -> list[str]:
        fixed = "--max-length 64 --per-device-train-batch-size 2 --learning-rate 1e-3 --device cpu --max-steps 20"
        where = ["--states", place, "--weights", place, "--save-steps", "3"]
        return ["train", str(model), str(data), "-o", str(run), *fixed.split(), *where]

    whole = directory / f"whole-{place}"
    seconds = killing.measure(command(whole))
    expected = killing.outcome(whole)
    hit = runs = different = 0
    for hit, run in killing.survive(command, directory / place, kills, seed, 1.1 * seconds):
        runs += 1
        different += not killing.same(killing.outcome(run), expected)
        print(f"states on {place}: {hit} of {kills} kills, {runs} runs ended, {different} different", flush=True)
    return Result(place, hit, runs, different, seconds)


def main() -> int:
    """Print and save what was seen; with --check, 1 where a run ended differently."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        results = [crash(place, given.kills // 2, given.seed, Path(directory)) for place in ("disk", "host")]
    write_json(given.json, results)
    missed = [
        f"{r.different} of {r.runs} runs with states on {r.place} ended differently" for r in results if r.different
    ]
    return exit_code(given.check, missed)


if __name__ == "__main__":
    sys.exit(main())
