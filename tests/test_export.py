"""Saved points on their way out, and what verify says of them."""

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

import directories
from spillway.cli.main import run
from spillway.report.metrics import read_metrics
from spillway.verify import _largest


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    model, data = directories.make_model(directory / "llama"), directories.make_texts(directory / "texts.jsonl")
    fixed = "--max-length 64 --per-device-train-batch-size 2 --learning-rate 1e-3 --device cpu --max-steps 5"
    more = "--states disk --weights disk --save-total-limit 3"
    assert run(["train", str(model), str(data), "-o", str(directory / "run"), *fixed.split(), *more.split()]) == 0
    return directory / "run"


def test_an_exported_point_is_the_final_model(trained: Path, tmp_path: Path) -> None:
    assert run(["export", str(trained), str(tmp_path / "out")]) == 0
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(trained / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_an_exported_point_has_the_buffers_that_training_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(vocab_size=300, first_k_dense_replace=1, **sizes, **heads, **widths, **experts)
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "model")
    directories.make_tokenizer().save_pretrained(tmp_path / "model")
    forward = DeepseekV3TopkRouter.forward

    def balances(router: Any, hidden: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            with torch.no_grad():
                router.e_score_correction_bias += 0.5
        return forward(router, hidden)

    monkeypatch.setattr(DeepseekV3TopkRouter, "forward", balances)
    data, out = directories.make_texts(tmp_path / "texts.jsonl"), tmp_path / "run"
    fixed = "--max-length 32 --per-device-train-batch-size 1 --max-steps 2 --dtype float32 --device cpu"
    where = "--states disk --weights disk"
    arguments = ["train", str(tmp_path / "model"), str(data), "-o", str(out), *fixed.split(), *where.split()]
    assert run(arguments) == 0
    assert run(["export", str(out), str(tmp_path / "out")]) == 0
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "out", out / "model"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(ours[name], theirs[name]) and (ours[name] > 0).all()


def test_an_export_to_float32_holds_every_bit_of_the_masters(trained: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "float16"):
        assert run(["export", str(trained), str(tmp_path / dtype), "--dtype", dtype]) == 0
    wide, half = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "float16"))
    narrow = load_file(trained / "model" / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "float32").dtype == torch.float32
    below = 0
    for name, weight in wide.items():
        assert weight.dtype == torch.float32 and torch.equal(half[name], weight.half())
        # bfloat16 weights are the masters rounded to nearest.
        torch.testing.assert_close(narrow[name].float(), weight, rtol=2**-8, atol=0)
        below += int((weight != narrow[name].float()).sum())
    assert below > 0, "the lower halves are missing"


def test_narrow_states_train_and_export_from_float32_sources(tmp_path: Path) -> None:
    model, data = directories.make_model(tmp_path / "llama"), directories.make_texts(tmp_path / "texts.jsonl")
    fixed = "--max-length 64 --per-device-train-batch-size 2 --learning-rate 1e-3 --device cpu --max-steps 20"
    more = "--states disk --weights disk --optim adamw_8bit --master-bits 24"
    out = tmp_path / "run"
    assert run(["train", str(model), str(data), "-o", str(out), *fixed.split(), *more.split()]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert run(["verify", str(out)]) == 0
    assert run(["export", str(out), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    wide, narrow = load_file(tmp_path / "wide" / "model.safetensors"), load_file(out / "model" / "model.safetensors")
    for name, weight in wide.items():
        torch.testing.assert_close(narrow[name].float(), weight, rtol=2**-8, atol=0)
        assert not (weight.view(torch.int32) & 0xFF).any(), "a master has more than 24 bits"


def test_a_run_that_was_moved_is_verified_and_exported(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    (trained / "store").rename(tmp_path / "away")
    try:
        monkeypatch.chdir("/")
        assert run(["verify", str(moved)]) == 0
        assert run(["export", str(moved), str(tmp_path / "out")]) == 0
    finally:
        (tmp_path / "away").rename(trained / "store")


def test_a_run_is_found_from_another_directory_than_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories.make_model(tmp_path / "llama")
    directories.make_texts(tmp_path / "texts.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fixed = "--max-length 64 --per-device-train-batch-size 2 --device cpu --states disk --store drive"
    assert run(["train", "llama", "texts.jsonl", "-o", "run", *fixed.split(), "--max-steps", "1"]) == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(["verify", "../run"]) == 0
    assert run(["export", "../run", "out"]) == 0
    given = ["../llama", "../texts.jsonl", "-o", "../run", *fixed.replace("drive", "../drive").split()]
    assert run(["train", *given, "--max-steps", "2"]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_what_was_exported_before_in_other_pieces_does_not_stay(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "mine.safetensors"):
        (out / name).write_bytes(b"old")
    assert run(["export", str(trained), str(out), "--overwrite"]) == 0
    assert sorted(file.name for file in out.glob("*.safetensors")) == ["mine.safetensors", "model.safetensors"]


def test_a_model_with_fewer_positions_and_dropout_is_verified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = directories.make_model(tmp_path / "gpt2", architecture="gpt2")
    data = directories.make_texts(tmp_path / "texts.jsonl")
    out = tmp_path / "run"
    flags = "--per-device-train-batch-size 1 --gradient-accumulation-steps 2 --dtype float32 --max-steps 2 --device cpu"
    assert run(["train", str(model), str(data), "-o", str(out), *flags.split()]) == 0
    assert run(["verify", str(out), "--against-resident", "2"]) == 0
    assert run(["plan", str(model), str(data), "--hardware", "rtx4090+990pro"]) == 0


def test_an_earlier_point_is_exported_by_its_step(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(trained), str(tmp_path / "out"), "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(trained / "model" / "model.safetensors")
    assert not all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert run(["export", str(trained), str(tmp_path / "other"), "--step", "1"]) == 2
    assert "step 1 is not saved: there is 5, 4, 3" in capsys.readouterr().err


def test_verify_reads_every_byte_and_names_what_is_damaged(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(trained), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["step"] for point in points] == [5, 4, 3] and not any(point["problem"] for point in points)
    manifest = json.loads((trained / "store" / "step-00000004.json").read_text())["body"]
    file, offset = trained / "store" / "spillway.data", manifest["units"][2]["offset"] + 4096
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        assert run(["verify", str(trained)]) == 5
        message = " ".join(capsys.readouterr().err.split())
        assert f"{file} is damaged at offset" in message and "step 5: 2" in message
        assert run(["verify", str(trained), "--json"]) == 5
        found = json.loads(capsys.readouterr().out)
        assert "is damaged at offset" in found["error"] and found["exit_code"] == 5 and len(found["points"]) == 3
        assert run(["export", str(trained), str(tmp_path / "out"), "--step", "4"]) == 5
        assert run(["export", str(trained), str(tmp_path / "out"), "--step", "5"]) == 0
    finally:
        file.write_bytes(before)


def test_a_run_on_drives_that_can_only_be_read_is_checked_and_exported(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def read_only(path: Any, flags: int, *mode: int) -> int:
        if str(path).startswith(str(trained / "store")) and flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    assert run(["verify", str(trained)]) == 0
    assert run(["export", str(trained), str(tmp_path / "out")]) == 0


def test_blocks_to_compare_without_steps_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(trained), "--layers", "2"]) == 2
    assert "--layers is for --against-resident" in capsys.readouterr().err


def test_verify_compares_streamed_steps_with_plain_pytorch(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(trained), "--against-resident", "3", "--layers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["against_resident"]
    assert found["steps"] == 3 and found["layers"] == 2
    assert 0 <= found["largest_loss_difference"] < 1e-2 and len(set(found["losses"])) == 3
    assert found["largest_weight"] > 0 and not list(trained.glob("verify-*"))


def test_a_loss_that_is_no_number_is_no_agreement() -> None:
    assert math.isnan(_largest([0.001, math.nan])) and _largest([0.5, 2.0]) == 2.0


def test_a_directory_that_is_no_run_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["verify", str(tmp_path)], ["export", str(tmp_path), str(tmp_path / "out")]):
        assert run(command) == 2
        assert "is not a run directory" in capsys.readouterr().err


def test_nothing_that_is_there_is_written_over(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, used = trained.parent / "llama", tmp_path / "used"
    used.mkdir()
    (used / "config.json").write_text("{}")
    assert run(["export", str(trained), str(used)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    for output, text in ((source, "started from"), (trained, "is a run")):
        assert run(["export", str(trained), str(output), "--overwrite"]) == 2
        assert text in capsys.readouterr().err
    assert run(["verify", str(trained)]) == 0
