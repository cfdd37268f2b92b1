"""A model takes the place of the one that was written there before as a whole."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import models
import spillway
from spillway.checkpoint import save
from spillway.checkpoint.save import finish_save

SHARD = 20_000


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.fixture
def streaming() -> Any:
    model, optimizer = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-2), device="cpu")
    yield model, optimizer
    spillway.close(model)


def step(model: nn.Module, optimizer: Any) -> None:
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()


def shards(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_kill_while_one_model_takes_the_place_of_another_never_mixes_them(
    streaming: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = streaming
    versions = []
    for number in range(2):
        step(model, optimizer)
        spillway.save_pretrained(model, tmp_path / str(number), max_shard_bytes=SHARD)
        versions.append(shards(tmp_path / str(number)))
    there = tmp_path / "0"
    assert len(list(there.glob("*.safetensors"))) > 2
    replaced = os.replace
    for deadly in range(0, 200, 3):
        calls = iter(range(1000))

        def kill(source: Any, target: Any, calls: Any = calls, deadly: int = deadly) -> None:
            if next(calls) == deadly:
                raise Killed
            replaced(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", kill)
            try:
                spillway.save_pretrained(model, there, max_shard_bytes=SHARD)
                break
            except Killed:
                pass
        if (there / "model.safetensors.index.json").exists():
            found = shards(there)
            assert any(all(torch.equal(found[name], kept[name]) for name in kept) for kept in versions)
        elif finish_save(there):
            assert AutoModelForCausalLM.from_pretrained(there) is not None
            assert all(torch.equal(shards(there)[name], tensor) for name, tensor in versions[1].items())
        assert list(there.glob("*.index.json")), "nothing is left to load"
        spillway.save_pretrained(model, there, max_shard_bytes=SHARD)
    else:
        raise AssertionError("the save never came to its end")
    assert not list(there.glob("*.new"))


def test_without_room_for_two_models_the_index_is_gone_until_all_of_it_is_there(
    streaming: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = streaming
    spillway.save_pretrained(model, tmp_path, max_shard_bytes=SHARD)
    step(model, optimizer)
    monkeypatch.setattr(save, "available", lambda _: 0)
    written = save._write_shard
    seen = []

    def write(*args: Any) -> None:
        seen.append((tmp_path / "model.safetensors.index.json").exists())
        written(*args)

    monkeypatch.setattr(save, "_write_shard", write)
    spillway.save_pretrained(model, tmp_path, max_shard_bytes=SHARD)
    assert len(seen) > 2 and not any(seen)
    assert (tmp_path / "model.safetensors.index.json").exists() and not list(tmp_path.glob("*.new"))
