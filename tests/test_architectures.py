"""What transformers can build, ours trains as plain PyTorch does: every architecture under -m full, a few always."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import reference
import spillway
from architectures import KINDS, tiny

EVERY = [(kind, name) for kind, names in KINDS.items() for name in sorted(names)]
SOME = [("causal", "gpt_oss"), ("causal", "mamba"), ("seq2seq", "mbart")]
STEPS = 3


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*one, marks=() if one in SOME else pytest.mark.full) for one in EVERY]
)
def test_an_architecture_of_transformers_trains_as_in_plain_pytorch(kind: str, name: str, tmp_path: Path) -> None:
    assert_trains_as_plain(kind, name, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_an_architecture_of_transformers_trains_on_a_gpu(kind: str, name: str, tmp_path: Path) -> None:
    assert_trains_as_plain(kind, name, tmp_path, "cuda")


def assert_trains_as_plain(kind: str, name: str, store: Path, device: str) -> None:
    plain, batch = tiny(kind, name)
    disturbed = rounded_otherwise(copy.deepcopy(plain))
    ours, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=1e-3, eps=reference.EPS),
        store=store,
        device=device,
        weights="disk",
        states="disk",
        activations="recompute",
    )
    losses = []
    there = {key: value.to(device) for key, value in batch.items()}
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = ours(**there).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    spillway.close(ours)
    for one, expected, other in zip(losses, trained(plain, batch), trained(disturbed, batch), strict=True):
        # Some are so sensitive that plain PyTorch goes apart from itself.
        assert one == pytest.approx(expected, rel=1e-5, abs=5 * abs(other - expected))


def rounded_otherwise(model: nn.Module) -> nn.Module:
    """With every weight off by no more than its rounding."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + 2**-24 * torch.randn(param.shape, generator=generator))
    return model


def trained(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """The losses of plain PyTorch."""
    optimizer = torch.optim.AdamW(reference.groups(model, 0.01), lr=1e-3, eps=reference.EPS)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
