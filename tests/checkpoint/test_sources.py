"""Model directories as they come: pickled, with too much, too little, or something else in them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import directories
import models
import reference
import spillway
from spillway.api import read_parameters
from spillway.assembly import prepared
from spillway.checkpoint.sources import DirectorySource, Wanted
from spillway.spec.errors import UsageError


def load(directory: Path, **options: bool) -> nn.Module:
    model = spillway.load(directory, AutoModelForCausalLM, dtype="float32", **options)
    model, _ = spillway.prepare(model, device="cpu", host_memory="4GB")
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.make_model(tmp_path_factory.mktemp("model") / "llama")


def test_pickled_weights_are_read_only_when_allowed(directory: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(directory, pickled)
    weights = load_file(directory / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(weights, pickled / "pytorch_model.bin")
    with pytest.raises(UsageError, match="allow_pickle=True"):
        load(pickled)
    model = load(pickled, allow_pickle=True)
    found = read_parameters(model)
    spillway.close(model)
    assert all(torch.equal(found[name], weights[name]) for name in found)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code ran')",)


def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(directory: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(directory, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save({"weight": Bomb()}, pickled / "pytorch_model.bin")
    with pytest.raises(UsageError, match="cannot be read as weights only"):
        load(pickled, allow_pickle=True)


def altered(directory: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    shutil.copytree(directory, target)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del weights[key]
        else:
            weights[key] = tensor
    save_file(weights, target / "model.safetensors")
    return target


def test_tensors_the_model_has_no_use_for_are_listed(directory: Path, tmp_path: Path) -> None:
    model = load(altered(directory, tmp_path / "more", vision__weight=torch.zeros(3)))
    assert prepared(model).origins.unexpected == ["vision.weight"]
    spillway.close(model)


def test_missing_misshapen_and_quantised_tensors_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no weights for model.norm.weight"):
        load(altered(directory, tmp_path / "less", model__norm__weight=None))
    with pytest.raises(UsageError, match=r"model.norm.weight has the shape \(3,\) and the model wants \(64,\)"):
        load(altered(directory, tmp_path / "shape", model__norm__weight=torch.zeros(3)))
    with pytest.raises(UsageError, match="quantised checkpoint"):
        load(altered(directory, tmp_path / "int8", model__norm__weight=torch.zeros(64, dtype=torch.int8)))


class Counting(nn.Module):
    """With a persistent buffer, as batch norms and some routers have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("temporary", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_persistent_buffers_are_filled_from_the_files(tmp_path: Path) -> None:
    saved = Counting()
    saved.seen += 5
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    model = Counting()
    source = DirectorySource(tmp_path, Wanted.of(model))
    assert model.seen.tolist() == [5, 5] and source.unexpected == []


def test_persistent_buffers_go_on_from_the_saved_point(tmp_path: Path) -> None:
    def start(resume: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        return spillway.prepare(Counting(), store=tmp_path, device="cpu", states="disk", weights="disk", resume=resume)

    model, optimizer = start(False)
    for _ in range(3):
        model(torch.ones(2, 8)).backward()
        optimizer.step()
    seen = model.seen.tolist()
    spillway.close(model)
    model, _ = start(True)
    prepared(model).session.open((torch.ones(2, 8),))
    assert model.seen.tolist() == seen and seen[0] >= 3
    spillway.close(model)


def moe_directory(directory: Path, kind: str) -> Path:
    """A mixture of experts as the hub has it: experts one by one in the files, stacked in the model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model: PreTrainedModel
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=12))
    else:
        config = Qwen3MoeConfig(**sizes, **heads, num_experts=12, moe_intermediate_size=16, head_dim=8)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ("mixtral", "qwen3"))
def test_experts_that_lie_one_by_one_in_the_files_are_stacked_and_written_back(tmp_path: Path, kind: str) -> None:
    directory = moe_directory(tmp_path / kind, kind)
    stored = load_file(directory / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = dict(plain.named_parameters())
    assert set(weights) - set(stored), "transformers stacks them no more: this test tests nothing"
    model = load(directory)
    assert prepared(model).origins.unexpected == []
    found = read_parameters(model)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    spillway.save_pretrained(model, tmp_path / "out")
    spillway.close(model)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_experts_that_lie_the_other_way_round_are_refused(tmp_path: Path) -> None:
    file = moe_directory(tmp_path, "mixtral") / "model.safetensors"
    stored = load_file(file)
    name = next(name for name in stored if name.endswith("w1.weight"))
    save_file({**stored, name: stored[name].T.contiguous()}, file, {"format": "pt"})
    with pytest.raises(UsageError, match="do not make up"):
        prepared(load(tmp_path))


@pytest.mark.parametrize("kind", ("mixtral", "qwen3"))
def test_a_mixture_of_experts_trains_as_in_plain_pytorch(tmp_path: Path, kind: str) -> None:
    directory = moe_directory(tmp_path / kind, kind)
    model = spillway.load(directory, AutoModelForCausalLM, dtype="float32")
    settings = spillway.AdamW(lr=1e-3, eps=reference.EPS, max_grad_norm=1.0)
    model, optimizer = spillway.prepare(model, settings, store=tmp_path / "store", device="cpu", states="disk")
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    steps = [[models.batch("llama", seed)] for seed in range(3)]
    ours = []
    for (batch,) in steps:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        ours.append(loss.item())
    theirs = reference.train(plain, steps, 1e-3, 1.0)
    assert ours == pytest.approx(theirs, rel=1e-5)
    weights = read_parameters(model)
    spillway.close(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param, rtol=1e-5, atol=1e-5)
