"""Training keeps no cache of keys, whoever is asked for one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DynamicCache, XLMConfig, XLMWithLMHeadModel

import models
import reference
import spillway
from spillway.api import close
from spillway.spec.errors import UsageError


class Around(nn.Module):
    """Hands what it was not told on to a language model, as models of images and text do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.llama()
        self.model.config.use_cache = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=use_cache).loss


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_a_use_cache_that_is_handed_on_as_none_is_off(activations: str, tmp_path: Path) -> None:
    plain = Around()
    ours, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=1e-3, eps=reference.EPS),
        store=tmp_path,
        device="cpu",
        micro_batch=1,
        activations=activations,
    )
    batches = [{key: models.batch("llama", number)[key] for key in ("input_ids", "labels")} for number in range(3)]
    losses = []
    for batch in batches:
        loss = ours(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = reference.train(plain, [[batch] for batch in batches], 1e-3, 1.0)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    close(ours)


@pytest.mark.parametrize("activations", ("recompute", "tape"))
def test_an_architecture_that_makes_a_cache_in_every_forward_trains(activations: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = XLMConfig(
        vocab_size=models.VOCAB, emb_dim=32, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0, pad_index=0
    )
    plain = XLMWithLMHeadModel(config)
    ours, optimizer = spillway.prepare(
        copy.deepcopy(plain), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu", activations=activations
    )
    batches = [{key: models.batch("llama", number)[key] for key in ("input_ids", "labels")} for number in range(2)]
    for batch in batches:
        loss = ours(**batch).loss
        loss.backward()
        optimizer.step()
    expected = reference.train(plain, [[batch] for batch in batches], 1e-3, 1.0)
    assert loss.item() == pytest.approx(expected[-1], rel=1e-5)
    close(ours)


def test_a_cache_with_keys_is_refused_where_there_are_gradients(tmp_path: Path) -> None:
    model, _ = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    ids = models.batch("llama", 0)["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, past_key_values=DynamicCache()).past_key_values
    assert cache.get_seq_length() == ids.shape[1]
    with pytest.raises(UsageError, match="was given a cache with keys"):
        model(input_ids=ids, labels=ids, past_key_values=cache)
    close(model)
