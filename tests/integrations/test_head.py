"""A head's product, whose gradient is added where it belongs."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from spillway.integrations.head import apply_head
from spillway.model.work import MemoryMeter

VOCAB, HIDDEN = 4096, 32


def head_of(bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCAB, bias=bias)


def gradients(head: nn.Linear, product: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    head.zero_grad()
    for piece in rows.split(2):
        product(piece).sin().sum().backward()
    return [rows.grad, *(param.grad for param in head.parameters())]


@pytest.mark.parametrize("bias", (True, False))
def test_gradients_are_those_of_the_plain_head(bias: bool) -> None:
    head = head_of(bias)
    expected = gradients(head, head)
    for ours, theirs in zip(gradients(head, lambda rows: apply_head(head, head.forward, rows)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_where_gradients_are_gathered_already_none_is_made_of_its_own() -> None:
    head = head_of(False)
    head.weight.grad = torch.zeros_like(head.weight)
    rows = torch.randn(2, HIDDEN)
    peaks = []
    for product in (head, lambda rows: apply_head(head, head.forward, rows)):
        with MemoryMeter([rows, head.weight, head.weight.grad]) as meter:
            product(rows).sum().backward()
        peaks.append(meter.peak)
    assert peaks[1] < VOCAB * HIDDEN * 4 <= peaks[0]


@pytest.mark.parametrize("frozen", (True, False))
def test_where_the_head_casts_or_is_frozen_or_is_no_plain_one_its_own_forward_computes(frozen: bool) -> None:
    head = head_of(False)
    asked = []

    def forward(rows: torch.Tensor) -> torch.Tensor:
        asked.append(rows)
        return head(rows)

    apply_head(head, forward, torch.randn(2, HIDDEN))
    assert len(asked) == 1
    head.weight.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16):
        logits = apply_head(head, head.forward, torch.randn(2, HIDDEN))
    assert logits.dtype == torch.bfloat16
