"""Killed with SIGKILL at any instant, a run goes on and ends as if nothing had happened."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import directories
import killing
from spillway.rundir import losses_shown
from spillway.store.manifest import manifest_files


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("inputs")
    return directories.make_model(directory / "llama"), directories.make_texts(directory / "texts.jsonl")


@pytest.fixture(scope="module")
def whole(
    inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    """What a run comes to that was not killed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    killing.measure(command(inputs, run, "disk"))
    return killing.outcome(run)


def command(inputs: tuple[Path, Path], run: Path, place: str, *more: str) -> list[str]:
    model, data = map(str, inputs)
    fixed = ["--max-length", "64", "--per-device-train-batch-size", "2", "--learning-rate", "1e-3", "--device", "cpu"]
    where = ["--states", place, "--weights", place, "--save-steps", "3", "--max-steps", "12"]
    return ["train", model, data, "-o", str(run), *fixed, *where, *more]


@pytest.mark.parametrize(("place", "kills"), (("disk", 18), ("host", 12)))
def test_a_run_killed_at_random_instants_ends_like_one_that_was_not(
    inputs: tuple[Path, Path], tmp_path: Path, place: str, kills: int
) -> None:
    seconds = killing.measure(command(inputs, tmp_path / "whole", place))
    expected = killing.outcome(tmp_path / "whole")
    assert [step for step, _ in expected[0]] == list(range(1, 13))
    apart = 1 if place == "disk" else 3  # saved points, in steps

    def keeps_all_but_the_last(run: Path) -> None:
        """What a step has made is saved by the end of the next one, where each step is a saved point."""
        shown, saved = len(losses_shown(run)), manifest_files(run / "store")
        assert (saved[0][0] if saved else 0) >= (shown - 1) // apart * apart

    for hit, run in killing.survive(
        lambda run: command(inputs, run, place), tmp_path, kills, 7, 1.1 * seconds, keeps_all_but_the_last
    ):
        assert killing.same(killing.outcome(run), expected), f"after {hit} kills"


def test_an_export_that_was_killed_leaves_the_run_whole_and_can_be_repeated(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    killing.measure(command(inputs, run, "disk"))
    for name, before in (("replace", True), ("replace", False), ("fsync", True), ("posix_fallocate", False)):
        deadly = killing.Deadly(name, 1, before)
        assert killing.finish(killing.start(["export", str(run), str(out)], deadly)) == -signal.SIGKILL
        assert killing.finish(killing.start(["verify", str(run)])) == 0
    assert killing.finish(killing.start(["export", str(run), str(out)])) == 0
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, run / "model"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.usefixtures("whole")  # after which the machine is measured, and runs make the same calls
def test_a_kill_around_calls_that_make_something_durable_is_survived(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    def short(run: Path) -> list[str]:
        return command(inputs, run, "disk", "--max-steps", "4")

    # Amid the steps, and the last one, which belongs to the model or to what comes after it.
    kills = {"replace": ((0.5, False), (1.0, True)), "fsync": ((1.0, True),), "fdatasync": ((0.5, False),)}
    calls = killing.Counting(tuple(kills), tmp_path / "calls")
    assert killing.finish(killing.start(short(tmp_path / "whole"), calls)) == 0
    expected = killing.outcome(tmp_path / "whole")
    for name, count in calls.counts().items():
        assert count >= 3
        for share, before in kills[name]:
            run, deadly = tmp_path / f"{name}-{share}", killing.Deadly(name, int(share * count), before)
            assert killing.finish(killing.start(short(run), deadly)) == -signal.SIGKILL
            assert killing.finish(killing.start(short(run))) == 0
            assert killing.same(killing.outcome(run), expected), (name, share)


# The first step that is saved, and the second, whose place the first then takes as the file with room for the next one.
FILES = (("step-", 1), ("step-", 3), ("config.json", 1), ("saved-step", 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("file", "call"), FILES)
def test_a_kill_around_the_first_writes_of_a_file_is_survived(
    inputs: tuple[Path, Path],
    whole: tuple[list[tuple[int, float]], dict[str, torch.Tensor]],
    tmp_path: Path,
    file: str,
    call: int,
) -> None:
    run = tmp_path / "run"
    for before in (True, False):
        deadly = killing.Deadly("replace", call, before, file)
        assert killing.finish(killing.start(command(inputs, run, "disk"), deadly)) == -signal.SIGKILL
    assert killing.finish(killing.start(command(inputs, run, "disk"))) == 0
    assert killing.same(killing.outcome(run), whole)


def test_a_run_in_place_that_is_killed_around_the_name_of_its_last_step_goes_on_or_begins_anew(
    inputs: tuple[Path, Path], whole: tuple[list[tuple[int, float]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    for before in (True, False):
        run = tmp_path / str(before)
        in_place = command(inputs, run, "disk", "--save-total-limit", "0", "--save-steps", "100")
        deadly = killing.Deadly("replace", 1, before, "step-")
        assert killing.finish(killing.start(in_place, deadly)) == -signal.SIGKILL
        assert bool(manifest_files(run / "store")) != before
        assert killing.finish(killing.start(in_place)) == 0
        assert killing.same(killing.outcome(run), whole)


def test_a_run_in_place_that_is_killed_when_it_goes_on_never_takes_units_of_two_steps_for_one(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Around the end of the name of what it has saved, after which the next step writes over that."""

    def in_place(run: Path, steps: int) -> list[str]:
        return command(inputs, run, "disk", "--save-total-limit", "0", "--max-steps", str(steps))

    for run in (tmp_path / "whole", tmp_path / "before", tmp_path / "after"):
        assert killing.finish(killing.start(in_place(run, 5))) == 0
    assert killing.finish(killing.start(in_place(tmp_path / "whole", 8))) == 0
    for run in (tmp_path / "before", tmp_path / "after"):
        deadly = killing.Deadly("replace", 1, run.name == "before", "step-")
        assert killing.finish(killing.start(in_place(run, 8), deadly)) == -signal.SIGKILL
    assert killing.finish(killing.start(in_place(tmp_path / "before", 8))) == 0
    assert killing.same(killing.outcome(tmp_path / "before"), killing.outcome(tmp_path / "whole"))
    told = tmp_path / "told"
    assert killing.finish(killing.start(in_place(tmp_path / "after", 8), errors=told)) == 2
    assert "optimizer states were not saved" in " ".join(told.read_text().split())
