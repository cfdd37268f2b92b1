"""Weights that a model's forward uses outside of the modules that hold them."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters
from spillway.spec.errors import UsageError

LR = 1e-3


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    return [models.batch("read_elsewhere", seed) for seed in range(steps)]


def train(model: nn.Module, store: Path, given: list[dict[str, torch.Tensor]], **options: object) -> None:
    model, optimizer = spillway.prepare(
        model,
        spillway.AdamW(lr=LR, eps=reference.EPS),
        store=store,
        device="cpu",
        weights="disk",
        states="disk",
        **options,  # type: ignore[arg-type]
    )
    with torch.no_grad():
        model(**given[0])
    for batch in given:
        model(**batch).backward()
        optimizer.step()


def assert_alike(model: nn.Module, plain: nn.Module) -> None:
    weights = read_parameters(model)
    close(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)


def test_they_are_known_by_an_evaluation_before_the_first_step(tmp_path: Path) -> None:
    plain = models.read_elsewhere()
    model = copy.deepcopy(plain)
    train(model, tmp_path, batches(3))
    reference.train(plain, [[batch] for batch in batches(3)], LR, 1.0)
    assert_alike(model, plain)


def test_a_run_goes_on_from_its_saved_point(tmp_path: Path) -> None:
    whole, first, second = (models.read_elsewhere() for _ in range(3))
    train(whole, tmp_path / "whole", batches(4))
    train(first, tmp_path / "cut", batches(4)[:2])
    close(first)
    train(second, tmp_path / "cut", batches(4)[2:], resume=True)
    weights, expected = read_parameters(second), read_parameters(whole)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    close(whole)
    close(second)


class LooksAtValuesFirst(models.ReadElsewhere):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if input_ids.max().item() < 0:
            raise ValueError("no such token")
        return super().forward(input_ids, labels, attention_mask)


def test_small_tables_may_be_read_by_a_forward_that_looks_at_values(tmp_path: Path) -> None:
    plain = LooksAtValuesFirst()
    model = copy.deepcopy(plain)
    train(model, tmp_path, batches(3))
    reference.train(plain, [[batch] for batch in batches(3)], LR, 1.0)
    assert_alike(model, plain)


def test_without_a_batch_to_show_them_they_are_refused(tmp_path: Path) -> None:
    model = spillway.stream(models.read_elsewhere(), store=tmp_path, device="cpu")
    with torch.no_grad(), pytest.raises(UsageError, match=r"positions\.weight.*example="):
        model(**batches(1)[0])
    close(model)


class Probe(nn.Module):
    """All that is trained is a parameter that the model's own forward uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
        self.head = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x @ self.head).square().mean()


def test_they_are_trained_where_nothing_else_is(tmp_path: Path) -> None:
    plain = Probe()
    model = copy.deepcopy(plain)
    given = [{"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    train(model, tmp_path, given)
    reference.train(plain, [[batch] for batch in given], LR, 1.0)
    assert_alike(model, plain)


def test_a_hook_on_their_gradient_is_refused(tmp_path: Path) -> None:
    model, _ = spillway.prepare(Probe(), spillway.AdamW(lr=LR), store=tmp_path, device="cpu")
    model.head.register_hook(torch.zeros_like)
    with pytest.raises(UsageError, match="was given a hook on its gradient"):
        model(x=torch.randn(4, 8))
    close(model)
