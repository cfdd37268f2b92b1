"""Drives that fail while training goes on: retried, then one sentence, the last good step intact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import directories
import killing

_TRAIN = (
    "import sys, spillway.native as n; init = n.DiskEngine.__init__\n"
    "n.DiskEngine.__init__ = lambda self, depth=32, block=1 << 20, uring=False: init(self, depth, block, False)\n"
    "from spillway.__main__ import main; main()"
)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("layer") / "faults.so"
    source = Path(__file__).parent / "faults.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("inputs")
    return directories.make_model(directory / "llama"), directories.make_texts(directory / "texts.jsonl")


@pytest.fixture(scope="module")
def expected(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    killing.measure(command(inputs, run))
    return run


def command(inputs: tuple[Path, Path], run: Path) -> list[str]:
    model, data = map(str, inputs)
    fixed = ["--max-length", "64", "--per-device-train-batch-size", "2", "--learning-rate", "1e-3", "--device", "cpu"]
    return ["train", model, data, "-o", str(run), *fixed, "--states", "disk", "--weights", "disk", "--max-steps", "6"]


def train(inputs: tuple[Path, Path], run: Path, layer: Path, fault: str) -> subprocess.CompletedProcess[str]:
    """Through the thread pool, whose system calls the fault layer reaches."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"LD_PRELOAD": str(layer), "SPILLWAY_FAULT": fault}
    line = [sys.executable, "-c", _TRAIN, *command(inputs, run)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("fault", ("eio:60:2", "short:30:500"))
def test_a_passing_fault_and_short_transfers_change_nothing(
    inputs: tuple[Path, Path], tmp_path: Path, layer: Path, expected: Path, fault: str
) -> None:
    done = train(inputs, tmp_path / "run", layer, fault)
    assert done.returncode == 0, done.stderr
    assert killing.same(killing.outcome(tmp_path / "run"), killing.outcome(expected))


@pytest.mark.parametrize(("fault", "words"), (("eio", "Input/output error"), ("enospc", "No space left")))
def test_a_lasting_fault_stops_the_run_with_the_last_good_step_intact(
    inputs: tuple[Path, Path], tmp_path: Path, layer: Path, expected: Path, fault: str, words: str
) -> None:
    run = tmp_path / "run"
    stopped = train(inputs, run, layer, f"{fault}:200:1000000")
    message = " ".join(stopped.stderr.split())
    assert stopped.returncode == 5, message
    assert words in message and f"{run}/store/spillway.data at offset" in message and "intact" in message
    assert "Traceback" not in message
    assert 0 < len((run / "metrics.jsonl").read_text().splitlines()) < 6
    assert killing.finish(killing.start(command(inputs, run))) == 0
    assert killing.same(killing.outcome(run), killing.outcome(expected))


def test_a_store_path_that_is_gone_is_named_when_the_run_goes_on(
    inputs: tuple[Path, Path], tmp_path: Path, layer: Path
) -> None:
    run = tmp_path / "run"
    killing.measure(command(inputs, run))
    (run / "store" / "spillway.data").unlink()
    stopped = train(inputs, run, layer, "none:0:0")
    assert stopped.returncode == 5 and "spillway.data, a part of the saved run, is missing" in stopped.stderr


def test_nothing_is_allocated_on_the_drives_once_training_has_begun(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    killing.measure(command(inputs, run))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    file = run / "store" / "spillway.data"
    assert {row["peak_bytes"]["disk"] for row in rows} == {file.stat().st_size}
    assert file.stat().st_blocks * 512 >= file.stat().st_size, "the file has holes: a write could still find no room"
