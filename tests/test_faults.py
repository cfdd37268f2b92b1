"""Drives that fail while training goes on: retried, then one sentence, the last good step intact."""

import json
from pathlib import Path

import pytest

import directories
import killing
from spillway.native import DiskEngine
from spillway.store.manifest import load_manifest


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


def train(inputs: tuple[Path, Path], run: Path, fault: str, *more: str, uring: bool = False) -> tuple[int, str]:
    """The exit code, and what was said."""
    errors = run.with_suffix(".errors")
    code = killing.finish(killing.start([*command(inputs, run), *more], killing.Failing(fault, uring), errors))
    return code, " ".join(errors.read_text().split())


@pytest.fixture(params=("threads", "io_uring"))
def uring(request: pytest.FixtureRequest) -> bool:
    """Whether transfers go by io_uring, where the kernel has it."""
    if request.param == "io_uring" and DiskEngine().backend != "io_uring":
        pytest.skip("io_uring is missing or forbidden here")
    return bool(request.param == "io_uring")


@pytest.mark.parametrize("fault", ("eio:60:2", "short:30:500"))
def test_a_passing_fault_and_short_transfers_change_nothing(
    inputs: tuple[Path, Path], tmp_path: Path, expected: Path, fault: str, uring: bool
) -> None:
    code, said = train(inputs, tmp_path / "run", fault, uring=uring)
    assert code == 0, said
    assert ("(io_uring" in said) == uring
    assert killing.same(killing.outcome(tmp_path / "run"), killing.outcome(expected))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("fault", "words"), (("eio", "Input/output error"), ("enospc", "No space left")))
def test_a_lasting_fault_stops_the_run_with_the_last_good_step_intact(
    inputs: tuple[Path, Path], tmp_path: Path, expected: Path, fault: str, words: str, uring: bool
) -> None:
    run = tmp_path / "run"
    code, message = train(inputs, run, f"{fault}:200:1000000", uring=uring)
    assert code == 5, message
    assert words in message and f"{run}/store/spillway.data at offset" in message and "intact" in message
    assert "Traceback" not in message
    assert 0 < len((run / "metrics.jsonl").read_text().splitlines()) < 6
    assert killing.finish(killing.start(command(inputs, run))) == 0
    assert killing.same(killing.outcome(run), killing.outcome(expected))


def test_a_store_path_that_is_gone_is_named_when_the_run_goes_on(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    killing.measure(command(inputs, run))
    (run / "store" / "spillway.data").unlink()
    code, message = train(inputs, run, "none:0:0")
    assert code == 5 and "spillway.data, a part of the saved run, is missing" in message


IN_MEMORY = ("--states", "host", "--weights", "host", "--save-steps", "2")
ROOMS = {
    "every step is saved": ("full:100:1", ()),
    "steps in place": ("full:100:1", ("--save-total-limit", "0", "--save-steps", "1")),
    "states in memory": ("full:45:1", IN_MEMORY),
}


@pytest.mark.parametrize("case", ROOMS)
def test_a_drive_that_others_fill_meanwhile_stops_nothing_before_the_model_is_written(
    case: str, inputs: tuple[Path, Path], tmp_path: Path, expected: Path
) -> None:
    run, (fault, more) = tmp_path / "run", ROOMS[case]
    code, said = train(inputs, run, fault, *more)
    assert code == 5, said
    assert f"warning: {run}/metrics.jsonl cannot be written (No space left on device)" in said
    assert f"the model cannot be written to {run}/model: No space left on device" in said and "Traceback" not in said
    assert "the last step is saved, and the same command writes the model" in said
    point = load_manifest(run / "store")
    assert point is not None and point.step == 6, "every step was made and saved"
    assert len((run / "metrics.jsonl").read_text().splitlines()) < 6
    assert killing.finish(killing.start([*command(inputs, run), *more])) == 0
    (lines, ours), (all_lines, theirs) = killing.outcome(run), killing.outcome(expected)
    assert killing.same(([], ours), ([], theirs))
    assert set(lines) < set(all_lines) and lines[-1] == all_lines[-1], "lines that found no room are not there"


def test_nothing_is_allocated_on_the_drives_once_training_has_begun(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    killing.measure(command(inputs, run))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    file = run / "store" / "spillway.data"
    assert {row["peak_bytes"]["disk"] for row in rows} == {file.stat().st_size}
    assert file.stat().st_blocks * 512 >= file.stat().st_size, "the file has holes: a write could still find no room"
