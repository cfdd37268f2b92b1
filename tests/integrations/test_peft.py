"""LoRA on a model that streams: the results of peft and plain PyTorch, the base never written, adapters alone saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import directories
import models
import reference
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.spec.errors import UsageError

peft = pytest.importorskip("peft")

LR = 1e-2
BASE = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.make_model(tmp_path_factory.mktemp("model") / "llama")


def config(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [models.batch("llama", number, length=12) for number in range(count)]


def streamed(directory: Path, store: Path, dtype: str = "float32", place: str = "disk", **changes: Any) -> Any:
    model = spillway.load(directory, AutoModelForCausalLM, dtype)
    model = spillway.add_adapter(model, config(**changes))
    settings = spillway.AdamW(lr=LR, eps=reference.EPS)
    return spillway.prepare(model, settings, store=store, device="cpu", weights=place, states=place)


def train(model: Any, optimizer: Any, count: int, first: int = 0) -> list[float]:
    losses = []
    for batch in batches(first + count)[first:]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_lora_on_a_streamed_base_equals_peft_in_memory(directory: Path, tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(3)
    model, optimizer = streamed(directory, tmp_path / "store", dtype)
    started = {name: tensor for name, tensor in read_after_opening(model).items() if "lora" in name}
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    plain = peft.get_peft_model(plain, config())
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if "lora" in name:
                assert name in started
                param.copy_(started[name])
    losses = train(model, optimizer, 6)
    expected = reference.train(plain, [[batch] for batch in batches(6)], LR, 1.0)
    torch.testing.assert_close(losses, expected, rtol=1e-5 if dtype == "float32" else 2e-3, atol=0)
    trained = read_parameters(model)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    for name, param in plain.named_parameters():
        torch.testing.assert_close(trained[name], param.detach(), rtol=tolerance, atol=tolerance, msg=name)
    assert all(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    close(model)


def read_after_opening(model: Any) -> dict[str, torch.Tensor]:
    prepared(model).session.open((), batches(1)[0])
    return read_parameters(model)


def test_adapters_start_as_their_config_says(directory: Path, tmp_path: Path) -> None:
    model, _ = streamed(directory, tmp_path / "store")
    started = read_after_opening(model)
    first = [tensor for name, tensor in started.items() if "lora_A" in name]
    assert first and all(tensor.abs().max() > 0 for tensor in first)
    assert all(not tensor.any() for name, tensor in started.items() if "lora_B" in name)
    close(model)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    "changes",
    (
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "gaussian"},
        {"modules_to_save": ["lm_head"]},
    ),
    ids=["all", "embedding", "beside"],
)
def test_a_seed_gives_the_adapters_that_it_gives_in_memory(
    directory: Path, changes: dict[str, Any], dtype: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    torch.manual_seed(5)
    plain = peft.get_peft_model(plain, config(**changes))
    after = torch.rand(1)
    torch.manual_seed(5)
    ours = spillway.add_adapter(spillway.load(directory, AutoModelForCausalLM, dtype), config(**changes))
    assert torch.equal(torch.rand(1), after)
    found = dict(ours.named_parameters())
    adapters = {name: param for name, param in plain.named_parameters() if "lora_" in name}
    assert adapters and all(torch.equal(found[name], param) for name, param in adapters.items())


def test_the_base_is_never_written_and_the_adapter_alone_is_saved(directory: Path, tmp_path: Path) -> None:
    model, optimizer = streamed(directory, tmp_path / "store", "bfloat16", modules_to_save=["lm_head"])
    train(model, optimizer, 3)
    session, base = prepared(model).session, load_file(directory / "model.safetensors")
    trained = sum(unit.layout.num_trainable for unit in session.units)
    before = written(model)
    train(model, optimizer, 3)
    session.come_to_rest()
    # Weight, master and moments of what is trained, each array in whole pages.
    arrays = sum(len(unit.layout.components) for unit in session.units if unit.layout.num_trainable)
    assert 0 < (written(model) - before) / 4 <= 12 * trained + 4096 * arrays
    weights = read_parameters(model)
    torch.testing.assert_close(weights[BASE], base["model.layers.0.self_attn.q_proj.weight"].bfloat16(), rtol=0, atol=0)
    out = spillway.save_pretrained(model, tmp_path / "adapter")
    close(model)
    saved = load_file(out / "adapter_model.safetensors")
    assert {"lora_A", "lora_B", "lm_head"} == {part for key in saved for part in key.split(".")} & {
        "lora_A", "lora_B", "lm_head", "base_layer", "embed_tokens"
    }  # fmt: skip
    assert not (out / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    plain = peft.PeftModel.from_pretrained(plain, out)
    loaded = dict(plain.named_parameters())
    for name, tensor in weights.items():
        if "lora" in name or "modules_to_save" in name:
            torch.testing.assert_close(loaded[name].detach(), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("place", ("disk", "host"))
def test_an_interrupted_run_goes_on_with_its_adapter(directory: Path, tmp_path: Path, place: str) -> None:
    torch.manual_seed(3)
    model, optimizer = streamed(directory, tmp_path / "whole", "bfloat16", place)
    expected = train(model, optimizer, 6)
    close(model)
    torch.manual_seed(3)
    model, optimizer = streamed(directory, tmp_path / "store", "bfloat16", place)
    losses = train(model, optimizer, 3)
    before = written(model)
    spillway.save_point(model)
    if place == "host":
        assert 0 < written(model) - before < 100_000  # of 260 kB of weights, and no base is among them
    close(model)
    for steps in (1, 2):
        model = spillway.add_adapter(spillway.load(directory, AutoModelForCausalLM), config())
        settings = spillway.AdamW(lr=LR, eps=reference.EPS)
        model, optimizer = spillway.prepare(model, settings, store=tmp_path / "store", device="cpu", resume=True)
        losses += train(model, optimizer, steps, first=optimizer.num_steps)
        spillway.save_point(model)
        close(model)
    assert losses == expected


def written(model: Any) -> int:
    return sum(prepared(model).session.store.homes.need_disk().written_bytes.values())


@pytest.mark.parametrize("beside", (None, ["lm_head"]))
def test_a_saved_adapter_is_trained_further(directory: Path, tmp_path: Path, beside: list[str] | None) -> None:
    model, optimizer = streamed(directory, tmp_path / "store", modules_to_save=beside)
    train(model, optimizer, 3)
    weights = read_parameters(model)
    out = spillway.save_pretrained(model, tmp_path / "adapter")
    close(model)
    model = spillway.load(directory, AutoModelForCausalLM, "float32")
    model, _ = spillway.prepare(spillway.add_adapter(model, out), spillway.AdamW(lr=LR), store=tmp_path / "next")
    for name, tensor in read_after_opening(model).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    close(model)


def test_what_needs_the_weights_of_the_base_is_refused(directory: Path, tmp_path: Path) -> None:
    for changes in ({"init_lora_weights": "olora"}, {"use_dora": True}):
        with pytest.raises(UsageError, match="starts from the weights of the base model"):
            streamed(directory, tmp_path / "store", **changes)
    model, _ = streamed(directory, tmp_path / "store")
    with pytest.raises(UsageError, match="adapters cannot be merged into it"):
        model.merge_and_unload()
    close(model)


def test_an_adapter_without_weights_is_not_trained_as_if_it_had_some(directory: Path, tmp_path: Path) -> None:
    # As peft.PeftModel.from_pretrained leaves one on a base without weights, too.
    model = peft.get_peft_model(spillway.load(directory, AutoModelForCausalLM), config())
    with pytest.raises(UsageError, match=r"lora_A.* it has no weights .*spillway.add_adapter"):
        spillway.prepare(model, store=tmp_path / "store", device="cpu")


def test_what_is_no_adapter_for_the_model_is_named(directory: Path, tmp_path: Path) -> None:
    model, optimizer = streamed(directory, tmp_path / "store")
    train(model, optimizer, 1)
    out = spillway.save_pretrained(model, tmp_path / "adapter")
    close(model)
    other = directories.make_model(tmp_path / "other", num_hidden_layers=4)
    with pytest.raises(UsageError, match="does not fit this model: .*layers.3"):
        spillway.add_adapter(spillway.load(other, AutoModelForCausalLM), out)
    with pytest.raises(UsageError, match="holds no adapter"):
        spillway.add_adapter(spillway.load(other, AutoModelForCausalLM), tmp_path)
    with pytest.raises(UsageError, match="no LoRA adapter"):
        spillway.add_adapter(spillway.load(other, AutoModelForCausalLM), peft.IA3Config())


def preference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Direct preference optimisation whose reference is the base, without its adapter."""
    ids = batch["input_ids"]

    def likelihood() -> torch.Tensor:
        scores = model(input_ids=ids).logits.float().log_softmax(-1)[:, :-1]
        return scores.gather(-1, ids[:, 1:, None]).sum(dim=(1, 2))

    policy = likelihood()
    with torch.no_grad(), model.disable_adapter():
        reference_of = likelihood()
    chosen, rejected = (policy - reference_of).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def test_the_base_alone_may_be_asked_between_forward_and_backward(directory: Path, tmp_path: Path) -> None:
    model, optimizer = streamed(directory, tmp_path / "store")
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), config())
    started = read_after_opening(model)
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(started[name])
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, eps=reference.EPS, weight_decay=0.01)
    losses, expected = [], []
    for batch in batches(4):
        loss = preference(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        loss = preference(plain, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert losses[-1] != losses[0]
    close(model)
