"""Model directories as they come: pickled, with too much, too little, or something else in them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import directories
import spillway
from spillway.api import prepared, read_parameters
from spillway.checkpoint.sources import DirectorySource
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
    with pytest.raises(UsageError, match="--allow-pickle"):
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
    assert prepared(model).unexpected == ["vision.weight"]
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
    aliases = {name: (name,) for name, _ in model.named_parameters()}
    source = DirectorySource(tmp_path, model, aliases)
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
