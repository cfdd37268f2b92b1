"""Parameter groups of one's own train as those of torch.optim do."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters
from spillway.spec.errors import UsageError

LR = 1e-3
SETTINGS = spillway.AdamW(lr=LR, eps=reference.EPS, weight_decay=0.01)


def by_depth(model: nn.Module) -> list[dict[str, Any]]:
    """The tied embedding and a half of the first block apart from the rest."""
    block = model.model.layers[0]
    return [
        {"params": [model.get_input_embeddings().weight], "lr": 1e-4, "weight_decay": 0.0},
        {"params": block.mlp.parameters(), "lr": 5e-3, "betas": (0.8, 0.99), "weight_decay": 0.1},
    ]


@pytest.mark.parametrize("update", ("serial", "overlap", "deferred"))
def test_each_group_has_its_own_settings_and_schedule(update: str, tmp_path: Path) -> None:
    plain = models.llama()
    own = by_depth(plain)
    own = [{**group, "params": list(group["params"])} for group in own]
    seen = {id(param) for group in own for param in group["params"]}
    rest = [{**g, "params": [p for p in g["params"] if id(p) not in seen]} for g in reference.groups(plain, 0.01)]
    torch_optimizer = torch.optim.AdamW([*own, *rest], lr=LR, eps=reference.EPS, fused=True)

    copied = copy.deepcopy(plain)
    model, optimizer = spillway.prepare(
        copied, SETTINGS, store=tmp_path, device="cpu", update=update, param_groups=by_depth(copied)
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, [lambda _: 1.0, lambda step: 1 / (1 + step), *[lambda _: 1.0] * 2])
        for each in (torch_optimizer, optimizer)
    ]
    for number in range(3):
        batch = models.batch("llama", number)
        expected = plain(**batch).loss
        expected.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        torch.testing.assert_close(loss.item(), expected.item(), rtol=1e-5, atol=0)
    trained = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(trained[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    close(model)


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda model: [{"params": [nn.Parameter(torch.ones(1))]}], "is not the model's"),
        (lambda model: [{"params": model.parameters()}] * 2, "no parameters|more than one"),
        (lambda model: [{"params": list(model.parameters())}] * 2, "is in more than one parameter group"),
        (lambda model: [{"lr": 1.0}], "has no parameters"),
        (lambda model: [{"params": model.parameters(), "momentum": 0.5}], "sets momentum, which AdamW has not"),
    ),
)
def test_groups_that_mean_nothing_are_refused(make: Callable[[nn.Module], Any], message: str) -> None:
    model = models.llama()
    with pytest.raises(UsageError, match=message):
        spillway.prepare(model, SETTINGS, device="cpu", param_groups=make(model))
