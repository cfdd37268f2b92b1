"""What only a GPU shows: memory of its own, streams, and host memory that has to be pinned."""

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import directories
import models
import spillway
from spillway import planner
from spillway.api import close, read_parameters
from spillway.cli.main import run
from spillway.runtime.device import open_device
from spillway.spec.plan import Plan
from spillway.spec.sizes import PAGE

pytestmark = pytest.mark.gpu

Trained = tuple[list[float], dict[str, torch.Tensor]]
# Whole segments that PyTorch's allocator asks the driver for: of what lies in them, and is counted, some is left over.
SEGMENTS = 40 << 20
VOCAB = 1024


def train(
    store: Path,
    settings: Any = None,
    on: AbstractContextManager[Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **asked: Any,
) -> Trained:
    model, optimizer = spillway.prepare(
        models.llama().to(dtype), settings or spillway.AdamW(lr=1e-3), store=store, device="cuda", **asked
    )
    with on or nullcontext():
        losses = models.train(model, optimizer, "llama", 4, "cuda")
    weights = read_parameters(model)
    close(model)
    return losses, weights


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


def test_a_stream_of_the_users_own_changes_no_bit(tmp_path: Path) -> None:
    expected = train(tmp_path / "default", weights="host", states="host")
    stream = torch.cuda.Stream()
    assert_same_bits(train(tmp_path / "own", on=torch.cuda.stream(stream), weights="host", states="host"), expected)


@pytest.mark.parametrize("most", (0, 64 * PAGE))
def test_where_host_memory_cannot_be_pinned_copies_take_a_detour_to_the_same_bits(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(tmp_path / "pinned", weights="disk", states="disk")
    driver = torch.cuda.cudart()

    class Limited:
        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return 2 if size > most else int(driver.cudaHostRegister(address, size, flags))

    monkeypatch.setattr(torch.cuda, "cudart", Limited)
    with pytest.warns(UserWarning, match="raise the limit of locked memory"):
        found = train(tmp_path / "detour", weights="disk", states="disk")
    assert_same_bits(found, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", ("adamw", "8bit", "24bit", "lion", "sgd"))
def test_updates_on_the_gpu_are_those_of_the_processor_to_rounding(rule: str, tmp_path: Path) -> None:
    settings = {
        "adamw": spillway.AdamW(lr=1e-3),
        "8bit": spillway.AdamW(lr=1e-3, moments="8bit"),
        "24bit": spillway.AdamW(lr=1e-3, moments="8bit", master_bits=24),
        "lion": spillway.Lion(lr=1e-4),
        "sgd": spillway.SGD(lr=0.1),
    }[rule]
    dtype = torch.bfloat16 if rule == "24bit" else torch.float32
    losses, weights = train(tmp_path / "host", settings, dtype=dtype, weights="host", states="host")
    found, there = train(tmp_path / "device", settings, dtype=dtype, weights="device", states="device")
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=0)
    # Where a moment is next to nothing its sign may differ, and a rounding that is drawn; weights by their last bit.
    near = [
        torch.isclose(there[name].float(), weight.float(), rtol=torch.finfo(weight.dtype).eps, atol=1e-5)
        for name, weight in weights.items()
    ]
    assert torch.cat([part.flatten() for part in near]).float().mean() > 0.999


def test_a_model_generates_what_the_plain_one_does(tmp_path: Path) -> None:
    plain = models.llama().eval()
    streamed = spillway.stream(copy.deepcopy(plain), store=tmp_path, weights="disk", device="cuda")
    prompt = torch.arange(5).reshape(1, 5)
    kinds: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = streamed.generate(prompt.cuda(), **kinds)
    assert torch.equal(found.cpu(), plain.generate(prompt, **kinds))
    close(streamed)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("activations", "rests", "asked"),
    (
        ("tape", "disk", {"update": "deferred"}),
        ("recompute", "host", {}),
        ("keep", "device", {"micro_batch": 1, "streams": 1}),
        ("host", "host", {}),
        ("auto", "auto", {"device_memory": "500MB"}),
        ("keep", "host", {"micro_batch": 1, "streams": 2}),
    ),
)
def test_the_gpu_holds_no_more_than_the_plans_of_any_length_say(
    activations: str, rests: str, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    make_plan = planner.make_plan
    monkeypatch.setattr(planner, "make_plan", lambda *given: plans.append(make_plan(*given)) or plans[-1])
    open_device("cuda")  # workspaces of the threads that compute
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model, optimizer = spillway.prepare(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=512, **sizes)),
        spillway.AdamW(lr=1e-3),
        store=tmp_path,
        device="cuda",
        activations=activations,
        weights=rests,
        states=rests,
        **asked,
    )
    torch.cuda.reset_peak_memory_stats()
    for length in (384, 64, 256, 33, 511):
        ids = torch.randint(0, VOCAB, (2, length), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    planned = max(plan.peaks.device for plan in plans)
    assert torch.cuda.max_memory_allocated() - before <= planned
    assert torch.cuda.max_memory_reserved() - before <= planned + SEGMENTS
    close(model)


def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    model = directories.make_model(tmp_path / "model")
    data = directories.make_texts(tmp_path / "texts.jsonl")
    fixed = "--max-length 64 --per-device-train-batch-size 2 --max-steps 3 --dtype float32 --learning-rate 1e-3"
    found = []
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        assert run(["train", str(model), str(data), "-o", str(out), "--device", device, *fixed.split()]) == 0
        lines = (out / "metrics.jsonl").read_text().splitlines()
        found.append([float(line.split('"loss": ')[1].split(",")[0]) for line in lines])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)
