"""The twenty commonest mistakes give one sentence and the right exit code, never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GemmaConfig

import directories
from spillway.cli.main import run

Fail = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return directories.make_texts(tmp_path / "texts.jsonl")


@pytest.fixture
def fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Fail:
    def attempt(*arguments: object) -> tuple[int, str]:
        given = [str(argument) for argument in arguments]
        code = run(["train", *given, *([] if "-o" in given else ["-o", str(tmp_path / "run")]), "--max-length", "64"])
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        last = errors.strip().splitlines()[-1]
        assert last.startswith("spillway: "), errors
        return code, last

    return attempt


def test_missing_data(fail: Fail, model: Path, tmp_path: Path) -> None:
    assert fail(model, tmp_path / "none.jsonl") == (
        2,
        f"spillway: {tmp_path}/none.jsonl does not exist: give the path of a .txt, .jsonl, .json, .parquet file",
    )


def test_missing_held_out_data_is_named_before_anything_is_read(fail: Fail, tmp_path: Path, data: Path) -> None:
    code, message = fail(tmp_path / "no-model", data, "--eval-data", tmp_path / "none.jsonl")
    assert code == 2 and f"{tmp_path}/none.jsonl does not exist" in message


def test_empty_data(fail: Fail, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    code, message = fail(model, tmp_path / "empty.jsonl")
    assert code == 2 and "there are no records" in message


def test_a_missing_field_and_a_bad_role_name_the_line(fail: Fail, model: Path, tmp_path: Path) -> None:
    path = directories.write_lines(tmp_path / "a.jsonl", [{"text": "fine"}, {"txt": "typo"}])
    assert fail(model, path)[1].startswith(f"spillway: {path}:2: a record needs")
    path = directories.write_lines(tmp_path / "b.jsonl", [{"messages": [{"role": "bot", "content": "x"}]}])
    assert f"{path}:1: role 'bot'" in fail(model, path)[1]


def test_messages_for_a_tokenizer_without_chat_template(fail: Fail, tmp_path: Path) -> None:
    model = directories.make_model(tmp_path / "base", template=None)
    path = directories.write_lines(tmp_path / "a.jsonl", [directories.chat("a", "b")])
    code, message = fail(model, path)
    assert code == 2 and "the tokenizer has none" in message


def test_a_model_directory_without_weights(fail: Fail, tmp_path: Path, data: Path) -> None:
    model = directories.make_model(tmp_path / "bare")
    (model / "model.safetensors").unlink()
    code, message = fail(model, data)
    assert code == 2 and "has no weights" in message
    (model / "pytorch_model.bin").write_bytes(b"")
    assert "only pickled .bin weights" in fail(model, data)[1]
    (model / "config.json").write_text("{")
    assert "cannot be read as a model" in fail(model, data)[1]
    (model / "config.json").unlink()
    assert "no config.json" in fail(model, data)[1]


def test_weights_of_another_shape(fail: Fail, tmp_path: Path, data: Path) -> None:
    model = directories.make_model(tmp_path / "odd")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    code, message = fail(model, data)
    assert code == 2 and "has the shape" in message


def test_a_truncated_weights_file(fail: Fail, tmp_path: Path, data: Path) -> None:
    model = directories.make_model(tmp_path / "cut")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    code, message = fail(model, data)
    assert code == 2 and "cannot be read as safetensors" in message


def test_a_budget_that_is_too_small_names_one_that_works(fail: Fail, model: Path, data: Path, tmp_path: Path) -> None:
    code, message = fail(model, data, "--host-memory", "20MB", "--device", "cpu")
    assert code == 3 and "host memory: the smallest budget that works is" in message and "--host-memory" in message
    code, message = fail(
        model, data, "--disk-memory", "1MB", "--states", "disk", "-o", tmp_path / "other", "--device", "cpu"
    )
    assert code == 3 and "disk memory: the smallest budget that works is" in message


def test_a_size_nobody_can_read(fail: Fail, model: Path, data: Path) -> None:
    code, message = fail(model, data, "--host-memory", "lots")
    assert code == 2 and "'lots' is not a size" in message


def test_a_store_that_cannot_be_written(fail: Fail, model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, message = fail(model, data, "--store", tmp_path / "file")
    assert code == 5 and "cannot be written" in message


def test_an_unknown_option_names_the_nearest(fail: Fail, model: Path, data: Path) -> None:
    code, message = fail(model, data, "--learning-rat", "1")
    assert code == 2 and "--learning-rate" in message


def test_an_unknown_name_in_a_config_file_names_the_nearest(
    fail: Fail, model: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("learning_rte: 1e-5\n")
    code, message = fail(model, data, "--config", tmp_path / "run.yaml")
    assert code == 2 and "did you mean learning_rate?" in message


def test_a_model_that_is_neither_here_nor_reachable(fail: Fail, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    code, message = fail("nobody/nothing", data)
    assert code == 2 and "the hub could not be reached" in message
    assert "is not a model directory" in fail("./nowhere", data)[1]


def test_a_gated_model(fail: Fail, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def gated(*_: object, **__: object) -> str:
        raise GatedRepoError.__new__(GatedRepoError)  # its arguments differ from version to version

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gated)
    code, message = fail("somebody/gated", data)
    assert code == 2 and "is gated: accept its terms" in message


def test_values_that_make_no_sense(fail: Fail, model: Path, data: Path) -> None:
    assert fail(model, data, "--learning-rate", "0")[1] == "spillway: --learning-rate must be more than 0, not 0.0"
    assert "is not one of" in fail(model, data, "--lr-scheduler-type", "zigzag")[1]
    assert "is not one of auto, cuda, cuda:1, cpu" in fail(model, data, "--device", "tpu")[1]
    assert "is not one of bfloat16, float16, float32" in fail(model, data, "--dtype", "float8")[1]
    assert fail(model, data, "--clip-by", "foo")[1] == "spillway: --clip-by foo is not one of norm, unit, value"
    assert "--loss-scale lots is not auto, dynamic or a number" in fail(model, data, "--loss-scale", "lots")[1]
    assert "exact global norm" not in fail(model, data, "--update", "sideways")[1]


def test_an_option_comes_from_flag_before_file_before_default(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('max_steps = 2\nseed = 5\nmax-length = 64\noutput_dir = "ignored"\n')
    out = tmp_path / "run"
    assert (
        run(["train", str(model), str(data), "-o", str(out), "--config", str(tmp_path / "run.toml"), "--seed", "6"])
        == 0
    )
    config = json.loads((out / "config.json").read_text())
    assert config["seed"] == {"value": 6, "origin": "flag"}
    assert config["max_steps"] == {"value": 2, "origin": "file"}
    assert config["update"] == {"value": "deferred", "origin": "planner"}


def test_the_first_help_page_is_short_and_the_second_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    run(["train", "--help"])
    first = capsys.readouterr().out
    run(["train", "--help-all"])
    everything = capsys.readouterr().out
    assert sum(line.startswith(("  --", "  -o", "  -h")) for line in first.splitlines()) <= 19
    assert "--warmup-ratio" in everything and "--warmup-ratio" not in first
    assert "Examples:" in first


def test_data_shows_what_is_trained(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directories.write_lines(tmp_path / "a.jsonl", [directories.chat("Where to?", "Down the river.")])
    assert run(["data", str(path), "--model", str(model)]) == 0
    assert "«Down the river.<|im_end|>»" in capsys.readouterr().out
    assert run(["data", str(path), "--model", str(model), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["records"] == 1 and 0 < counts["trained_tokens"] < counts["tokens"]


def test_a_directory_that_is_no_run_is_never_written_into(fail: Fail, model: Path, data: Path, tmp_path: Path) -> None:
    before = (model / "config.json").read_text()
    code, message = fail(model, data, "-o", model, "--device", "cpu")
    assert code == 2 and "holds files that are not of a run" in message
    assert (model / "config.json").read_text() == before


def test_more_nonsense(fail: Fail, model: Path, data: Path) -> None:
    for flag, value, words in (
        ("--seed", "-1", "must be from 0"),
        ("--seed", str(1 << 70), "must be from 0"),
        ("--num-train-epochs", "inf", "must be a finite number"),
        ("--max-grad-norm", "nan", "must be a finite number"),
        ("--weight-decay", "nan", "must be a finite number"),
        ("--max-steps", "-3", "more than 0"),
        ("--adam-beta1", "1.5", "in [0, 1)"),
        ("--max-grad-norm", "-1", "more than 0"),
        ("--host-memory", "64", "write a unit, for example 64GB"),
        ("--optim", "adamw_8bits", "did you mean adamw_8bit"),
        ("--states", "ram", "is not one of auto"),
    ):
        code, message = fail(model, data, flag, value, "--device", "cpu")
        assert code == 2 and words in message, message


def test_a_config_file_that_is_no_text_is_named(fail: Fail, model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"optim: \xff\n")
    code, message = fail(model, data, "--config", tmp_path / "run.yaml")
    assert code == 2 and "is not UTF-8 text" in message and "at byte 7" in message


def test_data_is_shown_in_rows_as_long_as_the_model_has_positions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directories.write_lines(tmp_path / "long.jsonl", [{"text": "word " * 2000}])
    assert run(["data", str(path), "--model", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest"] == 256


@pytest.mark.parametrize(
    "line", ("max_steps = 2.7", "learning_rate = true", "packing = 1", "store = [1, true]", "optim = [1]")
)
def test_a_value_of_another_kind_in_a_config_file_is_refused(
    line: str, model: Path, data: Path, tmp_path: Path, fail: Fail
) -> None:
    (tmp_path / "run.toml").write_text(line)
    code, message = fail(model, data, "--config", tmp_path / "run.toml")
    assert code == 2 and line.split(" =")[0] in message and "which is not" in message


def test_one_path_in_a_config_file_needs_no_list(model: Path, data: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(f"store: {tmp_path / 'store'}\neval_data: {data}\nmax_steps: 1\nmax_length: 32\ndevice: cpu\n")
    assert run(["train", str(model), str(data), "-o", str(out), "--config", str(config)]) == 0
    assert list((tmp_path / "store").iterdir())


def test_a_finished_run_without_saved_points_is_not_made_again(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(model), str(data), "-o", str(tmp_path / "run"), "--max-steps", "2", "--max-length", "32"]
    command += ["--device", "cpu", "--states", "host", "--weights", "host", "--activations", "recompute"]
    command += ["--disk-memory", "1MB"]
    assert run(command) == 0
    assert run(command) == 2
    assert "it cannot be resumed" in capsys.readouterr().err


def test_a_sweep_is_drawn(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    command = ["plan", str(model), "--hardware", "rtx4090+990pro+64GB", "--sweep", "batch", "--chart", str(picture)]
    assert run(command) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("flag", "meant"), (("--lr", "--learning-rate"), ("--bf16", "--dtype bfloat16")))
def test_options_of_other_tools_lead_to_ours(flag: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "model", "data.txt", flag, "1"]) == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


def test_a_model_that_looks_both_ways_is_no_causal_one(fail: Fail, data: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    made = BertForMaskedLM(BertConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    made.save_pretrained(tmp_path / "bert")
    directories.make_tokenizer().save_pretrained(tmp_path / "bert")
    code, message = fail(tmp_path / "bert", data)
    assert code == 2 and "BertLMHeadModel with this config looks both ways" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_here(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(model), "--device", "cuda"]) == 2
    assert "there is no CUDA device PyTorch can use here" in capsys.readouterr().err


def test_values_that_no_step_can_be_made_with(fail: Fail, model: Path, data: Path) -> None:
    for arguments, words in (
        (("--adam-epsilon", "-1"), "--adam-epsilon must be more than 0"),
        (("--store", ""), "a path is empty"),
        (("--clip-by", "unit", "--max-grad-norm", "0"), "clips nothing"),
        (("-o", ""), "--output-dir is empty"),
    ):
        code, message = fail(model, data, *arguments)
        assert code == 2 and words in message


def test_a_model_directory_without_a_tokenizer(fail: Fail, tmp_path: Path, data: Path) -> None:
    GemmaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    ).save_pretrained(tmp_path / "gemma")  # of which transformers makes an empty tokenizer
    (tmp_path / "gemma" / "model.safetensors").write_bytes(b"")
    code, message = fail(tmp_path / "gemma", data)
    assert code == 2 and "has no tokenizer: put tokenizer.json beside the model" in message
