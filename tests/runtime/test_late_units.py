"""Units that some steps do not reach: their bias corrections count their own updates, as PyTorch's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reference
import spillway
from models import VOCAB, Block
from spillway.api import close, read_parameters

# Of each step: whether the second branch is called.
CALLED = (False, False, True, True, False, True)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 24)
        self.always = nn.ModuleList(Block(24) for _ in range(2))
        self.sometimes = nn.ModuleList(Block(24) for _ in range(2))
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, both: bool) -> torch.Tensor:
        x, scale = self.embed(input_ids), {"scale": torch.ones(48)}
        for block in (*self.always, *(self.sometimes if both else ())):
            x, _ = block(x, scale)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(number: int) -> dict[str, Any]:
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids, "both": CALLED[number]}


def expected() -> dict[str, torch.Tensor]:
    model = Branches()
    reference.train(model, ([batch(number)] for number in range(len(CALLED))), 1e-2, None)
    return dict(model.named_parameters())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("update", ("auto", "serial", "overlap", "deferred"))
@pytest.mark.parametrize("states", ("device", "host", "disk"))
def test_weights_are_those_of_pytorch_also_after_resuming(update: str, states: str, tmp_path: Path) -> None:
    def prepare(resume: bool = False) -> tuple[nn.Module, spillway.AdamW]:
        return spillway.prepare(
            Branches(),
            spillway.AdamW(lr=1e-2, weight_decay=0.01, eps=reference.EPS, max_grad_norm=None),
            store=tmp_path,
            device="cpu",
            resume=resume,
            update=update,
            weights="device" if states == "device" else "host",
            states=states,
        )

    model, optimizer = prepare()
    for number in range(len(CALLED)):
        if number == 4:
            spillway.save_point(model)
            close(model)
            model, optimizer = prepare(resume=True)
            assert optimizer.num_steps == 4
        model(**batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = read_parameters(model)
    close(model)
    for name, weight in expected().items():
        torch.testing.assert_close(
            found[name], weight.detach(), rtol=2e-6, atol=2e-7, msg=lambda text, at=name: f"{at}: {text}"
        )
