"""Gradients are gathered where the plan has them, with one pass fewer for the first of each parameter."""

import pytest
import torch

from spillway.model.units import Unit
from spillway.runtime.window import Gradients, leaves
from spillway.store.layout import lay_out

PARAMS = [("weight", (3, 5), torch.float32, True), ("frozen", (4,), torch.float32, False),
          ("bias", (5,), torch.float32, True), ("unused", (70,), torch.float32, True)]  # fmt: skip
UNIT = Unit("linear", (), (), lay_out(PARAMS))


def backward(views: dict[str, torch.Tensor], x: torch.Tensor) -> None:
    (x @ views["weight"] + views["bias"]).square().sum().backward()


@pytest.mark.parametrize("times", (1, 3))
@pytest.mark.parametrize("is_fresh", (True, False))
def test_the_first_gradient_replaces_what_was_there_and_others_are_added(is_fresh: bool, times: int) -> None:
    weights = torch.linspace(-1, 1, UNIT.layout.weight_bytes // 4).view(torch.uint8)
    plain = {name: view.detach().clone().requires_grad_() for name, view in leaves(UNIT, weights).items()}
    slot = torch.full((UNIT.layout.grad_bytes // 4,), 7.0).view(torch.uint8)
    views, gradients = leaves(UNIT, weights), Gradients(UNIT, slot, is_fresh)
    for name, leaf in views.items():
        gradients.collect(name, leaf)
    for number in range(times):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        backward(views, x)
        backward(plain, x)
    gradients.finish()
    before = 0.0 if is_fresh else 7.0
    for place in UNIT.layout.places:
        if place.trainable:
            grad, wanted = UNIT.layout.view(place, slot), plain[place.name].grad
            torch.testing.assert_close(grad, before + (torch.zeros(place.shape) if wanted is None else wanted))
    gaps = torch.cat([slot[start:stop] for start, stop in UNIT.layout.grad_gaps]).view(torch.float32)
    assert gaps.numel() == UNIT.layout.grad_bytes // 4 - 15 - 5 - 70 and (gaps == before).all()
