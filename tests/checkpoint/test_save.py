"""A model takes the place of the one that was written there before as a whole."""

import errno
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
from spillway.checkpoint.save import finish_save, refuse_full
from spillway.spec.errors import DiskError

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


def test_what_a_killed_writing_has_left_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a drive with room for one model and a half."""
    (tmp_path / "model.safetensors.new").write_bytes(bytes(900))

    def free(directory: Path) -> int:
        return 1500 - sum(file.stat().st_size for file in directory.iterdir())

    monkeypatch.setattr(save, "available", free)
    refuse_full(tmp_path, 1000, "directory")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DiskError, match="1.60 kB .* 1.50 kB are free there: free some or choose another directory"):
        refuse_full(tmp_path, 1600, "directory")
    (tmp_path / "model.safetensors").write_bytes(bytes(700))
    monkeypatch.setattr(save, "MAX_SHARD_BYTES", 400)
    refuse_full(tmp_path, 1100, "directory")  # shard by shard
    with pytest.raises(DiskError):
        refuse_full(tmp_path, 1101, "directory")


def test_a_writing_that_fails_leaves_its_room(streaming: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = streaming
    step(model, optimizer)
    spillway.save_pretrained(model, tmp_path, max_shard_bytes=SHARD)
    before, reserve = {file.name for file in tmp_path.iterdir()}, os.posix_fallocate
    calls = iter(range(100))

    def full(fd: int, offset: int, length: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match="No space left"):
        spillway.save_pretrained(model, tmp_path, max_shard_bytes=SHARD)
    assert {file.name for file in tmp_path.iterdir()} == before


def test_a_config_that_cannot_be_written_is_an_error_of_the_drive(
    streaming: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, _ = streaming
    model(**models.batch("llama", 0))
    monkeypatch.setattr(model.config, "save_pretrained", full)
    with pytest.raises(DiskError, match=f"config and tokenizer cannot be written to {tmp_path}: No space left"):
        spillway.save_pretrained(model, tmp_path)
