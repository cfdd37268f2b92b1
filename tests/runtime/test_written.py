"""Blocks that write into the lists and dicts that they are given."""

import copy
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters

LR = 1e-3
WIDTH = 8


class Shared(UserDict[str, Any]):
    """A dict that PyTorch does not know to hold tensors."""


class Block(nn.Module):
    """Keeps its keys for later blocks, reads those of earlier ones, and adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, shared: Any, losses: list[torch.Tensor], cache: Any) -> torch.Tensor:
        keys = torch.tanh(self.keys(x))
        if "keys" in shared:
            keys = keys + shared["keys"][0] * shared["keys"][1]
        shared["keys"] = keys, torch.cos(x)
        losses.append(keys.square().mean())
        if len(losses) > 3:
            losses.pop(0)
        cache["deep"][0].update(last=keys.mean())
        return x + self.out(keys)


class Sharing(nn.Module):
    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.kind()
        losses: list[torch.Tensor] = []
        cache: dict[str, Any] = {"deep": ({},)}
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shared, losses, cache=cache)
        assert len(losses) == 3 and set(shared) == {"keys"}
        return x.square().mean() + sum(losses) + shared["keys"][0].mean() + cache["deep"][0]["last"]


def sharing(kind: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Sharing(kind)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, WIDTH, generator=generator) for _ in range(3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", (dict, Shared))
@pytest.mark.parametrize("freezes", (False, True))
@pytest.mark.parametrize("activations", ("recompute", "tape", "keep", "host"))
def test_what_they_write_is_trained_as_in_plain_pytorch(
    activations: str, freezes: bool, kind: Callable[[], Any], tmp_path: Path
) -> None:
    plain = sharing(kind)
    for part in (plain.get_submodule("first"), plain.get_submodule("blocks.0")):
        part.requires_grad_(not freezes)
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=LR, eps=reference.EPS),
        store=tmp_path,
        device="cpu",
        activations=activations,
        micro_batch=2,
    )
    found = []
    for batch in batches():
        loss = model(batch)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            model(batch)
    expected = reference.train(plain, [[{"x": batch}] for batch in batches()], LR, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    weights = read_parameters(model)
    close(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)


def test_layers_that_share_their_keys_train_as_in_plain_pytorch(tmp_path: Path) -> None:
    """Gemma 4: the last layers take the keys and values that earlier ones wrote into a dict."""
    kind = getattr(transformers, "Gemma4TextConfig", None)
    if kind is None:
        pytest.skip("this transformers has no Gemma 4")
    torch.manual_seed(0)
    config = kind(
        vocab_size=models.VOCAB,
        vocab_size_per_layer_input=models.VOCAB,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        max_position_embeddings=64,
    )
    plain = transformers.Gemma4ForCausalLM(config)
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=LR, eps=reference.EPS),
        store=tmp_path,
        device="cpu",
        weights="disk",
        states="disk",
        micro_batch=2,
    )
    texts = [models.batch("gemma2", seed) for seed in range(3)]
    found = []
    for batch in texts:
        loss = model(**batch).loss
        loss.backward()
        found.append(loss.item())
        optimizer.step()
    expected = reference.train(plain, [[batch] for batch in texts], LR, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    weights = read_parameters(model)
    close(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
