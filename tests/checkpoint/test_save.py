"""A model takes the place of the one that was written there before as a whole."""

import os
import shutil
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
    there, killed = tmp_path / "there", 0
    assert len(list((tmp_path / "0").glob("*.safetensors"))) > 2
    replaced = os.replace
    while True:
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(tmp_path / "0", there)
        calls = iter(range(1000))

        def kill(source: Any, target: Any, calls: Any = calls, deadly: int = killed) -> None:
            if next(calls) == deadly:
                raise Killed
            replaced(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", kill)
            try:
                spillway.save_pretrained(model, there, max_shard_bytes=SHARD)
                break
            except Killed:
                killed += 1
        # Either a model that can be loaded, and then one of the two, or the new one when it is asked for again.
        if not (there / "model.safetensors.index.json").exists():
            assert finish_save(there)
            assert equal(shards(there), versions[1])
            assert AutoModelForCausalLM.from_pretrained(there) is not None
        else:
            assert any(equal(shards(there), kept) for kept in versions)
    assert killed > len(list(there.glob("*.safetensors"))), "no kill came between two files"
    assert equal(shards(there), versions[1]) and not list(there.glob("*.new"))


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


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
