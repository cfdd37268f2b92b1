"""Training keeps no cache of keys, whoever is asked for one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close


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
