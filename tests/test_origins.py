"""Weights of one model from several places: directories that parts of it were loaded from, and memory."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel

import directories
import models
import reference
import spillway
from spillway.api import close, read_parameters
from spillway.spec.errors import UsageError

LR = 1e-3


class Reward(nn.Module):
    """Two bodies, from two directories, and a head of its own."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        torch.manual_seed(5)
        self.head = nn.Linear(128, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        bodies = (self.first, self.second)
        hidden = [body(input_ids=input_ids).last_hidden_state.mean(1) for body in bodies]
        return self.head(torch.cat(hidden, dim=-1)).square().mean()


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("model")
    return [directories.make_model(base / str(layers), num_hidden_layers=layers) for layers in (2, 3)]


def test_loaded_models_train_as_parts_of_another_one(bodies: list[Path], tmp_path: Path) -> None:
    ids = [models.batch("llama", number)["input_ids"] for number in range(4)]
    plain = Reward(*(AutoModel.from_pretrained(body, dtype=torch.float32) for body in bodies))
    model = Reward(*(spillway.load(body, AutoModel, "float32") for body in bodies))
    settings = spillway.AdamW(lr=LR, eps=reference.EPS)
    model, optimizer = spillway.prepare(model, settings, store=tmp_path, device="cpu", weights="disk", states="disk")
    losses = []
    for batch in ids:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = reference.train(plain, [[{"input_ids": batch}] for batch in ids], LR, 1.0)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    trained = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(trained[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    with pytest.raises(UsageError, match="the model was loaded from"):
        spillway.save_pretrained(model, bodies[1])
    close(model)


def test_a_part_without_weights_anywhere_is_named(bodies: list[Path], tmp_path: Path) -> None:
    model = Reward(*(spillway.load(body, AutoModel, "float32") for body in bodies))
    model.head = copy.deepcopy(model.head).to("meta")
    with pytest.raises(UsageError, match=r"head\.weight is on the meta device and is not of .*/2, .*/3"):
        spillway.prepare(model, store=tmp_path, device="cpu")


def test_a_model_that_did_not_fit_is_prepared_again_with_another_budget(bodies: list[Path], tmp_path: Path) -> None:
    model = Reward(*(spillway.load(body, AutoModel, "float32") for body in bodies))
    example = models.batch("llama", 0)["input_ids"]
    with pytest.raises(spillway.PlanInfeasible):
        spillway.prepare(model, store=tmp_path, device="cpu", device_memory="10kB", example={"input_ids": example})
    model, _ = spillway.prepare(model, store=tmp_path, device="cpu", example={"input_ids": example})
    saved = AutoModel.from_pretrained(bodies[0], dtype=torch.float32)
    torch.testing.assert_close(read_parameters(model)["first.embed_tokens.weight"], saved.embed_tokens.weight.detach())
    close(model)


def test_files_of_a_model_that_is_loaded_are_closed(bodies: list[Path], tmp_path: Path) -> None:
    body = Path(shutil.copytree(bodies[0], tmp_path / "body"))
    model, _ = spillway.prepare(spillway.load(body, AutoModel, "float32"), store=tmp_path / "store", device="cpu")
    assert str(body) in Path("/proc/self/maps").read_text()
    read_parameters(model)
    assert str(body) not in Path("/proc/self/maps").read_text()
    close(model)
