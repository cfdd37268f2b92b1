"""A run from the command line to the final model, interrupted and resumed."""

import errno
import itertools
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import directories
import killing
from spillway.cli.main import run
from spillway.data import Batches, DataPosition, encode_files
from spillway.hardware import probe
from spillway.integrations.tokenizer import load_tokenizer, pad_id
from spillway.runtime import lanes
from spillway.spec.errors import required
from spillway.training import run as training_run
from spillway.training import telling
from spillway.training.signals import stop_on_signals


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--max-length", "64", "--per-device-train-batch-size", "2", "--learning-rate", "1e-3", "--device", "cpu"]
    return ["train", str(model), str(data), "-o", str(out), *fixed, *more]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[object]:
    return [row["loss"] for row in metrics(out)]


def test_a_run_leaves_a_model_that_transformers_loads(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "30", "--states", "disk")) == 0
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert {"read", "write", "compute", "update"} <= rows[-1]["busy_seconds"].keys()
    assert (out / "plan.json").exists() and (out / "trace.json").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["max_steps"] == {"value": 30, "origin": "flag"} and config["seed"]["origin"] == "default"
    trained = AutoModelForCausalLM.from_pretrained(out / "model")
    assert trained.dtype == torch.bfloat16
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    ids = torch.arange(8)[None]
    assert trained(input_ids=ids).logits.isfinite().all()
    assert (out / "model" / "tokenizer.json").exists()


def test_a_trace_that_finds_no_room_fails_no_run(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, *_: Any) -> None:
        path.write_text("[")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(telling, "write_chrome_trace", full)
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "1")) == 0
    assert "trace.json cannot be written (No space left on device)" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run" / "trace.json").exists()


def test_the_final_model_of_a_tied_architecture_keeps_its_tie(data: Path, tmp_path: Path) -> None:
    model = directories.make_model(tmp_path / "gpt2", architecture="gpt2")
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "3", "--dtype", "float32")) == 0
    assert "lm_head.weight" not in load_file(out / "model" / "model.safetensors")
    trained = AutoModelForCausalLM.from_pretrained(out / "model")
    assert trained.lm_head.weight is trained.transformer.wte.weight


@pytest.mark.parametrize("place", ("disk", "host"))
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    model: Path, data: Path, tmp_path: Path, place: str
) -> None:
    where = ("--states", place, "--weights", place, "--save-steps", "4")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(arguments(model, data, whole, "--max-steps", "12", *where)) == 0
    told = tmp_path / "told"
    child = killing.start(arguments(model, data, cut, "--max-steps", "12", *where), errors=told)
    wait_for_step(cut, 2)
    os.kill(required(child.pid, "the child runs"), signal.SIGINT)
    code, errors = killing.finish(child), told.read_text()
    if code == 0:
        pytest.fail(f"the run ended before it could be interrupted: {errors}")
    assert code == 130, errors
    assert "same command goes on" in " ".join(errors.split())
    assert run(arguments(model, data, cut, "--max-steps", "12", *where)) == 0
    assert losses(cut) == losses(whole)
    ours, theirs = load_file(cut / "model" / "model.safetensors"), load_file(whole / "model" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    number: signal.Signals, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **options: object) -> object:
        signal.raise_signal(number)
        pytest.fail("it went on")

    monkeypatch.setattr("spillway.training.setup.load", load)
    before = signal.getsignal(number)
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "1")) == 130
    assert signal.getsignal(number) is before and not (tmp_path / "run" / "metrics.jsonl").exists()


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "metrics.jsonl").exists() and len(losses_so_far(out)) >= step:
            return
        time.sleep(0.005)
    pytest.fail("the child never got that far")


def losses_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


def test_a_run_whose_store_is_gone_is_not_started_over(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    flags = ("--max-steps", "3", "--states", "disk", "--weights", "disk")
    assert run(arguments(model, data, out, *flags)) == 0
    before = (out / "metrics.jsonl").read_text()
    shutil.rmtree(out / "store")
    assert run(arguments(model, data, out, *flags)) == 5
    assert "is its drive mounted?" in " ".join(capsys.readouterr().err.split())
    assert (out / "metrics.jsonl").read_text() == before
    for asked in (["verify", str(out)], ["export", str(out), str(tmp_path / "exported")]):
        assert run(asked) == 5
        assert "is its drive mounted?" in " ".join(capsys.readouterr().err.split())


def test_a_store_from_before_the_run_moved_is_not_gone_on_from(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, old, new = tmp_path / "run", tmp_path / "old", tmp_path / "new"
    flags = ("--states", "disk", "--weights", "disk")
    assert run(arguments(model, data, out, *flags, "--store", str(old), "--max-steps", "2")) == 0
    shutil.copytree(old, tmp_path / "copy")
    assert run(arguments(model, data, out, *flags, "--store", str(new), "--max-steps", "4")) == 0
    shutil.rmtree(old)
    shutil.copytree(tmp_path / "copy", old)  # as a kill just before the last act of the move leaves it
    assert run(arguments(model, data, out, *flags, "--store", str(old), "--max-steps", "6")) == 5
    assert "holds step 2, of before the run moved" in " ".join(capsys.readouterr().err.split())
    assert run(arguments(model, data, out, *flags, "--store", str(new), "--max-steps", "6")) == 0
    assert [row["step"] for row in metrics(out)] == list(range(1, 7))


def test_a_run_stops_when_its_drive_was_written_enough_and_goes_on_when_it_may(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    flags = ("--max-steps", "8", "--states", "disk", "--weights", "disk")
    assert run(arguments(model, data, whole, *flags)) == 0
    (total,) = metrics(whole)[-1]["written_bytes"].values()
    flags = (*flags, "--store", str(tmp_path / "a"), "--store", str(tmp_path / "b"))  # of one drive
    assert run(arguments(model, data, out, *flags, "--max-writes", str(total // 2))) == 5
    assert "all that --max-writes allows" in " ".join(capsys.readouterr().err.split())
    steps = len(metrics(out))
    assert 1 < steps < 8
    assert run(arguments(model, data, out, *flags, "--max-writes", str(total // 2))) == 5, "it goes on without end"
    assert len(metrics(out)) == steps
    assert run(arguments(model, data, out, *flags)) == 0
    assert losses(out) == losses(whole)
    written = sum(metrics(out)[-1]["written_bytes"].values())
    assert written > metrics(out)[steps - 1]["written_bytes"].popitem()[1]


def test_models_that_are_written_in_the_place_of_saved_points_count_as_written(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ("--max-steps", "8", "--states", "host", "--save-total-limit", "0", "--save-steps", "1")
    assert run(arguments(model, data, out, *flags)) == 0
    written = metrics(out)[-1]["written_bytes"][str(out)]
    size = (out / "model" / "model.safetensors").stat().st_size
    assert 6 * size < written < 7.1 * size
    assert run(arguments(model, data, tmp_path / "short", *flags, "--max-writes", "1MB")) == 5
    assert len(metrics(tmp_path / "short")) < 8


def test_a_run_saved_by_its_end_is_not_started_over_when_its_store_is_gone(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "2", "--states", "host")) == 0
    shutil.rmtree(out / "store")
    assert run(arguments(model, data, out, "--max-steps", "4", "--states", "host")) == 5
    assert "had step 2 saved" in " ".join(capsys.readouterr().err.split())


def test_a_finished_run_may_be_given_more_steps(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "3", "--lr-scheduler-type", "constant")) == 0
    assert run(arguments(model, data, out, "--max-steps", "6", "--lr-scheduler-type", "constant")) == 0
    whole = tmp_path / "whole"
    assert run(arguments(model, data, whole, "--max-steps", "6", "--lr-scheduler-type", "constant")) == 0
    assert losses(out) == losses(whole)


@pytest.mark.parametrize("where", (("--states", "device"), ("--weights", "device", "--states", "host")))
def test_states_on_the_device_are_saved_and_resumed(model: Path, data: Path, tmp_path: Path, where: Any) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    flags = ("--lr-scheduler-type", "constant", *where)
    assert run(arguments(model, data, out, "--max-steps", "2", *flags)) == 0
    assert run(arguments(model, data, out, "--max-steps", "4", *flags)) == 0
    assert run(arguments(model, data, whole, "--max-steps", "4", *flags)) == 0
    assert losses(out) == losses(whole)


def test_a_finished_run_started_again_does_nothing_new(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "3")) == 0
    before = losses(out)
    assert run(arguments(model, data, out, "--max-steps", "3")) == 0
    assert losses(out) == before


def test_a_run_with_other_settings_is_not_resumed(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "2")) == 0
    assert run(arguments(model, data, out, "--max-steps", "2", "--seed", "1")) == 2
    assert "another seed" in capsys.readouterr().err
    other = directories.make_texts(tmp_path / "other.jsonl", 20)
    assert run(arguments(model, other, out, "--max-steps", "2")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "with other data (samples are missing at the end (30 samples, before 60)): give the same" in said


@pytest.mark.parametrize(("part", "said"), [("chat template", "its chat template"), ("added", "its vocabulary and")])
def test_a_run_with_another_tokenizer_is_not_resumed(
    data: Path, tmp_path: Path, part: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where it makes the same tokens of the data: the model would be exported with another one."""
    directory, out = directories.make_model(tmp_path / "model"), tmp_path / "run"
    assert run(arguments(directory, data, out, "--max-steps", "2")) == 0
    tokenizer = load_tokenizer(directory)
    if part == "added":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    else:
        tokenizer.chat_template = str(tokenizer.chat_template) + " "
    tokenizer.save_pretrained(directory)
    assert run(arguments(directory, data, out, "--max-steps", "3")) == 2
    assert f"with another tokenizer ({said}" in " ".join(capsys.readouterr().err.split())


def test_several_store_paths_share_the_bytes(model: Path, data: Path, tmp_path: Path) -> None:
    stores = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    flags = [part for store in stores for part in ("--store", str(store))]
    one, three = tmp_path / "one", tmp_path / "three"
    assert run(arguments(model, data, one, "--max-steps", "4", "--states", "disk")) == 0
    assert run(arguments(model, data, three, "--max-steps", "4", "--states", "disk", *flags)) == 0
    assert losses(one) == losses(three)
    sizes = [next(store.rglob("spillway.data")).stat().st_size for store in stores]
    assert len(set(sizes)) == 1 and sizes[0] > 0


def test_micro_batches_inside_the_unit_leave_the_loss_as_it_is(model: Path, data: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    base = ["train", str(model), str(data), "--max-length", "64", "--max-steps", "5", "--dtype", "float32"]
    assert run([*base, "-o", str(whole), "--per-device-train-batch-size", "4"]) == 0
    cut_flags = ("--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "4")
    assert run([*base, "-o", str(cut), *cut_flags]) == 0
    torch.testing.assert_close(losses(whole), losses(cut), rtol=1e-5, atol=0)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_step(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code = run(arguments(model, data, out, "--max-steps", "40", "--learning-rate", "1e30", "--max-grad-norm", "0"))
    message = capsys.readouterr().err
    assert code == 6, message
    (manifest,) = (out / "store").glob("step-*.json")
    assert json.loads(manifest.read_text())["body"]["step"] == len(metrics(out))


@pytest.fixture
def one_bad_gradient(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """From the given gradient on, so many are infinite."""

    def spoil(first: int, count: int) -> None:
        seen = itertools.count()
        true = lanes.sum_squares

        def norm(values: torch.Tensor, threads: int) -> float:
            return float("inf") if first <= next(seen) < first + count else true(values, threads)

        monkeypatch.setattr(lanes, "sum_squares", norm)

    return spoil


def test_a_batch_with_an_infinite_gradient_stops_the_run_with_the_step_before_it_saved(
    model: Path, data: Path, tmp_path: Path, one_bad_gradient: Callable[[int, int], None]
) -> None:
    one_bad_gradient(9, 1)
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "4")) == 6
    done = len(metrics(tmp_path / "run"))
    assert 0 < done < 4
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "4")) == 0
    assert run(arguments(model, data, tmp_path / "whole", "--max-steps", "4")) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_batch_with_an_infinite_gradient_is_passed_over_where_the_user_said_so(
    model: Path, data: Path, tmp_path: Path, one_bad_gradient: Callable[[int, int], None], capsys: Any
) -> None:
    one_bad_gradient(9, 1)
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "4", "--non-finite", "skip")) == 0
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["skipped_steps"] == 0 and rows[-1]["skipped_steps"] == 1
    assert "was skipped, 1 so far" in " ".join(capsys.readouterr().err.split())
    assert run(arguments(model, data, tmp_path / "whole", "--max-steps", "5")) == 0
    assert set(losses(tmp_path / "run")) != set(losses(tmp_path / "whole")[:4])
    assert losses(tmp_path / "run")[0] == losses(tmp_path / "whole")[0]


def test_a_first_batch_that_is_passed_over_does_not_write_the_model(
    model: Path,
    data: Path,
    tmp_path: Path,
    one_bad_gradient: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_bad_gradient(0, 1)
    written: list[Path] = []
    monkeypatch.setattr(training_run, "save_pretrained", lambda model, output, **_: written.append(output))
    flags = ("--max-steps", "2", "--non-finite", "skip", "--states", "disk", "--save-total-limit", "0")
    assert run(arguments(model, data, tmp_path / "run", *flags)) == 0
    assert metrics(tmp_path / "run")[-1]["skipped_steps"] == 1
    assert len(written) == 1


def test_five_bad_batches_in_a_row_stop_the_run_all_the_same(
    model: Path, data: Path, tmp_path: Path, one_bad_gradient: Callable[[int, int], None], capsys: Any
) -> None:
    one_bad_gradient(9, 1000)
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "9", "--non-finite", "skip")) == 6
    said = "".join(capsys.readouterr().err.split())  # paths are broken where a line ends
    assert "5batchesinarowarenotfinite;thelastisstep2,batch5ofepoch0(" in said and f"{data}:" in said


def test_a_forward_that_overflows_float16_skips_the_step_and_halves_the_scale(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls = LlamaMLP.forward, iter(range(10**6))

    def overflows(mlp: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        is_real = hidden.device.type != "meta" and type(hidden) is torch.Tensor
        return forward(mlp, hidden) * (float("inf") if is_real and next(calls) == 0 else 1.0)

    monkeypatch.setattr(LlamaMLP, "forward", overflows)
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "3", "--dtype", "float16")) == 0
    assert "was skipped" in " ".join(capsys.readouterr().err.split())
    assert [row["skipped_steps"] for row in metrics(tmp_path / "run")][-1] == 1


def test_losses_that_no_scale_mends_end_a_run_in_float16(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, hidden: forward(mlp, hidden) * float("nan"))
    assert run(arguments(model, data, tmp_path / "run", "--max-steps", "9", "--dtype", "float16")) == 6
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(" was skipped: ") == 4 and "the loss of step 1 is nan" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", 3, "found no room for 2.00 GiB on the GPU"),
        ("", 4, "found no room for 1125899906842624 bytes in host memory"),
    ],
)
def test_memory_that_is_not_to_be_had_is_said_in_a_sentence_and_the_last_step_is_saved(
    error: str,
    code: int,
    said: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forward, calls = LlamaMLP.forward, itertools.count()

    def finds_none(mlp: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        is_real = hidden.device.type != "meta" and type(hidden) is torch.Tensor
        if is_real and next(calls) == 20:
            if error:
                raise torch.OutOfMemoryError(error)
            torch.empty(1 << 50, dtype=torch.uint8)
        return forward(mlp, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", finds_none)
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "9", "--states", "disk")) == code
    told = "".join(capsys.readouterr().err.split())
    assert "".join(said.split()) in told and "model.layers." in told and "issaved:thesamecommandgoeson" in told
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert run(arguments(model, data, out, "--max-steps", "9", "--states", "disk")) == 0
    assert [row["step"] for row in metrics(out)] == list(range(1, 10))


def test_held_out_data_is_evaluated_now_and_then_and_changes_nothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    flags = ("--max-steps", "5", "--states", "disk")
    assert run(arguments(model, data, plain, *flags)) == 0
    assert run(arguments(model, data, out, *flags, "--eval-data", str(data), "--eval-steps", "2")) == 0
    assert "held-out loss" in capsys.readouterr().err
    assert losses(out) == losses(plain)
    found = [line["eval_loss"] for line in metrics(out)]
    assert [loss is None for loss in found] == [True, False, True, False, False]
    assert found[4] < found[1]
    tokenizer = load_tokenizer(model)
    length = json.loads((out / "config.json").read_text())["max_length"]["value"]
    batches = Batches(
        encode_files((str(data),), tokenizer, length).samples, 1, length, 0, False, pad_id(tokenizer, None)
    )
    trained = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.bfloat16)
    total = count = 0.0
    with torch.no_grad():
        for index in range(batches.per_epoch()):
            batch = batches.at(DataPosition(0, index))
            tokens = int((batch["labels"] != -100).sum())
            total, count = total + tokens * float(trained(**batch).loss), count + tokens
    assert found[4] == pytest.approx(total / count, rel=5e-3)


def test_only_steps_as_planned_say_anything_of_the_machine(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--max-steps", "4", "--packing", "--update", "deferred", "--states", "disk", "--json")
    flushed = ("--eval-data", str(data), "--eval-steps", "1")  # leaves nothing for the next forward to update
    refined = []
    for name, more in (("planned", ()), ("flushed", flushed)):
        capsys.readouterr()
        assert run(arguments(model, data, tmp_path / name, *shape, *more)) == 0
        refined.append(json.loads(capsys.readouterr().out)["refined_step_s"])
    assert refined[0] > 0 and refined[1] == 0


def test_rates_that_a_run_shows_to_be_wrong_are_measured_anew(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(telling, "_TELLING_SECONDS", 0.0)
    where = ("--states", "disk", "--weights", "disk")

    def kept() -> Path:
        (file,) = (tmp_path / "cache" / "spillway").glob("rates-*.json")
        return file

    probe.forget(torch.device("cpu"))
    assert run(arguments(model, data, tmp_path / "first", *where, "--max-steps", "2")) == 0  # the third says something
    rates = json.loads(kept().read_text())
    for what, (_, value) in rates.items():
        if "block" in what:
            value["flops"] /= 1000  # the machine was busy
    kept().write_text(json.dumps(rates))
    monkeypatch.setattr(probe, "_measured", {})
    assert run(arguments(model, data, tmp_path / "second", *where, "--max-steps", "3")) == 0
    assert not list((tmp_path / "cache" / "spillway").glob("rates-*.json"))


def test_a_run_without_room_for_two_copies_is_made_in_place_and_says_so(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    flags = ("--max-steps", "4", "--states", "disk", "--weights", "disk")
    assert run(arguments(model, data, plain, *flags)) == 0
    need = json.loads((plain / "plan.json").read_text())["peaks"]["disk"]
    capsys.readouterr()
    assert run(arguments(model, data, out, *flags, "--disk-memory", str(int(0.7 * need)), "--save-steps", "2")) == 0
    assert "no saved points" in " ".join(capsys.readouterr().err.split())
    assert losses(out) == losses(plain)
    ours, theirs = load_file(out / "model" / "model.safetensors"), load_file(plain / "model" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [path.name for path in (out / "store").glob("step-*.json")] == ["step-00000004.json"]


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.mark.parametrize("place", (("--save-total-limit", "0"), ("--states", "host", "--save-steps", "100")))
@pytest.mark.parametrize("when", ("between steps", "in backward"))
def test_a_run_that_an_error_ends_saves_the_last_step_that_is_whole(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: tuple[str, ...],
    when: str,
) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    flags = ("--max-steps", "6", "--weights", "disk", *place)
    assert run(arguments(model, data, plain, *flags)) == 0
    name = "_evaluate" if when == "between steps" else "_forward_and_update"
    true = getattr(training_run._Run, name)

    def fails(self: Any, *given: Any) -> Any:
        if self._progress.step == 3 and when == "between steps":
            raise ZeroDivisionError
        if self._progress.step == 3:
            self._training.optimizer.scale = lambda loss: loss * torch.tensor([1.0, 2.0])  # backward wants a number
        return true(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(training_run._Run, name, fails)
        with pytest.raises(ZeroDivisionError if when == "between steps" else RuntimeError):
            run(arguments(model, data, out, *flags))
    assert "step 3 is saved: the same command goes on" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (out / "store").glob("step-*.json")] == ["step-00000003.json"]
    assert run(arguments(model, data, out, *flags)) == 0
    assert losses(out)[3:] == losses(plain)[3:]
    ours, theirs = load_file(out / "model" / "model.safetensors"), load_file(plain / "model" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_made_in_place_goes_on_after_a_stop_and_starts_over_after_a_crash(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    flags = ("--max-steps", "6", "--states", "disk", "--weights", "disk", "--save-total-limit", "0")
    assert run(arguments(model, data, plain, *flags)) == 0
    step = training_run._Run._step

    def then(happens: Callable[[], None]) -> None:
        def stepped(self: Any, *given: Any) -> None:
            step(self, *given)
            if self._progress.step == 3:
                happens()

        monkeypatch.setattr(training_run._Run, "_step", stepped)

    then(lambda: signal.raise_signal(signal.SIGTERM))
    assert run(arguments(model, data, out, *flags)) == 130
    assert "the same command goes on from there" in " ".join(capsys.readouterr().err.split())
    monkeypatch.undo()
    assert run(arguments(model, data, out, *flags)) == 0
    assert losses(out) == losses(plain)
    ours, theirs = load_file(out / "model" / "model.safetensors"), load_file(plain / "model" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def crash() -> None:
        raise Killed

    crashed = arguments(model, data, tmp_path / "crashed", *flags)
    then(crash)
    with pytest.raises(Killed):
        run(crashed)
    monkeypatch.undo()
    capsys.readouterr()
    assert run(crashed) == 0
    assert "3 steps" in capsys.readouterr().err
    assert losses(tmp_path / "crashed") == losses(plain)


def test_a_run_that_is_killed_while_it_writes_its_model_writes_it_the_next_time(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "2")) == 0
    first = load_file(out / "model" / "model.safetensors")
    longer = arguments(model, data, out, "--max-steps", "4")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training_run, "save_pretrained", killed)
    assert run(longer) == 130
    monkeypatch.undo()
    assert run(longer) == 0
    second = load_file(out / "model" / "model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_run_that_was_moved_with_all_its_drives_is_checked_where_they_are_now(
    model: Path, data: Path, tmp_path: Path
) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    stores = [flag for name in ("a", "b") for flag in ("--store", str(before / "run" / name))]
    assert run(arguments(model, data, before / "run", "--max-steps", "2", *stores)) == 0
    before.rename(now)
    assert run(["verify", str(now / "run")]) == 0
    assert run(["export", str(now / "run"), str(tmp_path / "exported")]) == 0
    whole = load_file(now / "run" / "model" / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], whole[name]) for name in whole)


def test_a_run_that_was_renamed_finds_its_store(model: Path, data: Path, tmp_path: Path) -> None:
    out, store = tmp_path / "run", ("--store", str(tmp_path / "fast"))
    assert run(arguments(model, data, out, "--max-steps", "2", *store)) == 0
    out.rename(tmp_path / "other")
    assert run(["verify", str(tmp_path / "other")]) == 0
    assert run(arguments(model, data, tmp_path / "other", "--max-steps", "4", *store)) == 0
    assert [row["step"] for row in metrics(tmp_path / "other")] == [1, 2, 3, 4]
    assert len(list((tmp_path / "fast").iterdir())) == 1


def test_a_run_that_moves_to_another_drive_says_so_and_goes_on(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, disk = tmp_path / "run", ("--states", "disk", "--update", "deferred")
    assert run(arguments(model, data, out, "--max-steps", "2", *disk, "--store", str(tmp_path / "one"))) == 0
    assert run(arguments(model, data, out, "--max-steps", "4", *disk, "--store", str(tmp_path / "two"))) == 0
    assert "is checked and moved from" in " ".join(capsys.readouterr().err.split())
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
    assert not list((tmp_path / "one").glob("spillway.data*"))
    third = sum(size for path, size in metrics(out)[2]["written_bytes"].items() if "two" in path)
    assert third > 0, "the move itself is written to the new drive, and of the third step nothing yet"


def test_what_is_written_is_counted_also_where_the_run_directory_is_relative(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = ["--max-steps", "30", "--states", "disk", "--max-writes", "4MB"]
    assert run(arguments(model, data, Path("run"), *limits)) == 5
    assert "all that --max-writes allows" in capsys.readouterr().err


def test_an_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


_TWICE = """
import os, signal, sys
from spillway.cli.main import run
from spillway.training.run import _Run

def asked_twice(self, *_):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

_Run._step = asked_twice
sys.exit(run(sys.argv[1:]))
"""


def test_the_second_interrupt_ends_the_process_where_it_is(model: Path, data: Path, tmp_path: Path) -> None:
    """Not by an exception, which from within an operator would abort it."""
    command = [sys.executable, "-c", _TWICE, *arguments(model, data, tmp_path / "run"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 130 and json.loads(ended.stdout)["exit_code"] == 130
    assert ended.stderr.strip().splitlines()[-1].startswith("spillway: stopped; the same command goes on")


_IN_BACKWARD = """
import hashlib, os, signal, threading
from spillway.training.signals import stop_on_signals

with stop_on_signals(lambda: os._exit(7)) as stop:
    stop.waits = True
    for seconds in (0.2, 0.8):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # for minutes, without the interpreter, as a backward on a GPU
"""


def test_interrupts_are_heard_while_the_main_thread_is_out_of_the_interpreter() -> None:
    ended = subprocess.run([sys.executable, "-c", _IN_BACKWARD], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 7
    assert ended.stderr.strip() == "stopping after the step in flight; once more to stop at once"


_HUNG_UP = """
import os, signal, sys
from spillway.report.progress import Reporter
from spillway.training.signals import stop_on_signals

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have ignored
with stop_on_signals() as stop:
    stop.waits = True
    os.write(2, b"up")
    sys.stdin.readline()  # the terminal is gone now
    os.kill(os.getpid(), signal.SIGHUP)
    with Reporter().counting("writing the saved point", 1.0) as counter:
        counter.advance(1.0)
    open(sys.argv[1], "w").write(str(stop.asked))
"""


def test_a_terminal_that_is_gone_keeps_nothing_from_being_saved(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", _HUNG_UP, str(tmp_path / "told")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=slave, stderr=slave) as child:
        os.close(slave)
        assert child.stdin is not None and os.read(master, 2) == b"up"
        os.close(master)
        child.stdin.write(b"\n")
        child.stdin.close()
        assert child.wait(60) == 0
    assert (tmp_path / "told").read_text() == "True"


def test_the_process_stays_within_the_memory_it_was_given(data: Path, tmp_path: Path) -> None:
    """All of it, libraries included; the states alone would take more."""
    big = directories.make_model(tmp_path / "llama", hidden_size=768, intermediate_size=3072, num_hidden_layers=6)
    flags = ["--host-memory", "850MB", "--max-steps", "4", "--dtype", "float32", "--json", "--eval-data", str(data)]
    command, told = arguments(big, data, tmp_path / "run", *flags), tmp_path / "told"
    assert killing.finish(killing.start(command, output=told)) == 0
    summary = json.loads(told.read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["peaks"]["disk"] > 0 and summary["measured_peaks"]["host"] <= 850e6
    measured = summary["measured_phases"]
    assert measured.keys() == {"load", "step", "evaluation", "save"}
    assert max(measured.values()) == summary["measured_peaks"]["host"]
    assert all(peak <= summary["predicted_phases"][phase]["host"] for phase, peak in measured.items())


def test_a_run_keeps_its_store_when_it_is_not_named_again(model: Path, data: Path, tmp_path: Path) -> None:
    out, flags = tmp_path / "run", ("--states", "disk")
    assert run(arguments(model, data, out, *flags, "--store", str(tmp_path / "fast"), "--max-steps", "2")) == 0
    for steps in ("4", "6"):
        assert run(arguments(model, data, out, *flags, "--max-steps", steps)) == 0
    assert not (out / "store").exists() and list((tmp_path / "fast").rglob("spillway.data"))


def test_what_a_move_that_was_killed_at_its_end_has_left_is_removed(model: Path, data: Path, tmp_path: Path) -> None:
    out, old, new = tmp_path / "run", tmp_path / "old", tmp_path / "new"
    flags = ("--states", "disk", "--weights", "disk")
    assert run(arguments(model, data, out, *flags, "--store", str(old), "--max-steps", "2")) == 0
    shutil.copytree(old, tmp_path / "copy")
    noted = (out / "stores.json").read_text()
    assert run(arguments(model, data, out, *flags, "--store", str(new), "--max-steps", "4")) == 0
    shutil.rmtree(old)
    shutil.copytree(tmp_path / "copy", old)
    (out / "stores.json").write_text(noted)
    assert run(arguments(model, data, out, *flags, "--store", str(new), "--max-steps", "6")) == 0
    assert not [*old.rglob("spillway.data*"), *old.rglob("step-*.json")]
    assert [row["step"] for row in metrics(out)] == list(range(1, 7))


def test_what_was_written_counts_also_after_the_run_was_renamed(model: Path, data: Path, tmp_path: Path) -> None:
    out, flags = tmp_path / "run", ("--states", "disk", "--weights", "disk")
    assert run(arguments(model, data, out, *flags, "--max-steps", "4")) == 0
    (before,) = metrics(out)[-1]["written_bytes"].values()
    out.rename(tmp_path / "other")
    limits = ("--max-steps", "30", "--max-writes", str(2 * before))
    assert run(arguments(model, data, tmp_path / "other", *flags, *limits)) == 5
    written = metrics(tmp_path / "other")[-1]["written_bytes"]
    assert written.keys() == {str(tmp_path / "other" / "store"), str(tmp_path / "other")}  # the first run's model
    assert 2 * before <= sum(written.values()) < 3 * before


def test_a_run_without_saved_points_does_not_say_that_it_can_go_on(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--states", "host", "--weights", "host", "--activations", "recompute", "--disk-memory", "1MB")
    flags = (*flags, "--max-steps", "30", "--save-steps", "1", "--max-writes", "1MB")
    assert run(arguments(model, data, tmp_path / "run", *flags)) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "its optimizer states are not saved" in said and "which is saved" not in said
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_trained_model_that_was_moved_away_is_written_again(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(arguments(model, data, out, "--max-steps", "2")) == 0
    (out / "model").rename(tmp_path / "mine")
    assert run(arguments(model, data, out, "--max-steps", "2")) == 0
    ours, theirs = (load_file(place / "model.safetensors") for place in (tmp_path / "mine", out / "model"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("inside", ("", "run", "store"))
def test_a_run_among_its_data_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    """It could not go on: its metrics and manifests would be data that was not there before."""
    texts = tmp_path / "texts"
    texts.mkdir()
    directories.make_texts(texts / "a.jsonl")
    out, store = (tmp_path / "run", texts / inside) if inside == "store" else (texts / inside, tmp_path / "store")
    assert run([*arguments(model, texts, out, "--max-steps", "1"), "--store", str(store)]) == 2
    assert "lies in the data directory" in " ".join(capsys.readouterr().err.split())
    assert [file.name for file in texts.iterdir()] == ["a.jsonl"]
    if inside == "run":
        hidden = arguments(model, texts, texts / ".run", "--max-steps", "1")
        assert run(hidden) == 0 and run([*hidden, "--max-steps", "2"]) == 0


def test_a_home_in_a_config_file_is_the_home(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = {"model": str(model), "data": [str(data)], "output_dir": "~/run", "max_steps": 1, "max_length": 64}
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    assert run(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    assert (tmp_path / "run" / "model").exists() and not (tmp_path / "~").exists()


def test_a_pad_token_that_the_model_has_not_is_not_used(model: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id >= 300
    assert run(arguments(tmp_path / "model", data, tmp_path / "run", "--max-steps", "1")) == 0
