"""What blocks give to each other: tensors that lie in memory in another order, that several blocks share, or whose
gradients lie where others come to lie."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.api import close, read_parameters

WIDTH, STEPS, LR = 8, 3, 0.1
ACTIVATIONS = ("recompute", "tape", "keep", "host", "disk")


class Chain(nn.Module):
    """Blocks of one kind, each added to what it is given."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.places = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, places = self.first(x), self.places(torch.ones(x.shape[1], WIDTH))
        for block in self.blocks:
            hidden = block(hidden, places)
        return hidden.square().mean()


class SharesPlaces(nn.Module):
    """A gradient of `places` is a view of that of the sum, which what lies around the block needs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + places.unsqueeze(0)


class SequenceFirst(nn.Module):
    """Gives [rows, length, width] that lies in memory as [length, rows, width], and views it so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        flat = x.transpose(0, 1).reshape(-1, WIDTH)
        return torch.tanh(self.linear(flat) + 1.0).view(length, rows, WIDTH).transpose(0, 1)


class Strict(nn.Module):
    """The same, and fails where what it is given lies otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        flat = x.transpose(0, 1).view(-1, WIDTH)
        return torch.tanh(self.linear(flat) + 1.0).view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)


class Gate(torch.autograd.Function):
    """Saves what it gives as a gradient, as fused losses do. (Not the gradient of anything.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.sin(x))
        return torch.cos(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return kept


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.linear(Gate.apply(x))


class Begins(nn.Module):
    """Makes what `Strict` can view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.linear(x).transpose(0, 1).contiguous().transpose(0, 1)


class Residual(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, places = self.first(x), self.places(torch.ones(x.shape[1], WIDTH))
        for block in self.blocks:
            hidden = hidden + block(hidden, places)
        return hidden.square().mean()


class Ordered(Chain):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block)
        self.blocks.insert(0, Begins())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared": lambda: Residual(SharesPlaces),
    "sequence-first": lambda: Chain(SequenceFirst),
    "strict": lambda: Ordered(Strict),
    "fused": lambda: Chain(Penalized),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(
    ("name", "micro_batch"),
    # Some of the rows of what lies sequence by sequence cannot be viewed as one, in plain PyTorch neither.
    [(name, rows) for name in MODELS for rows in (None, 1, 2) if (name, rows) != ("strict", 2)],
)
def test_gradients_are_those_of_plain_pytorch(
    name: str, micro_batch: int | None, activations: str, tmp_path: Path
) -> None:
    plain = MODELS[name]()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.SGD(lr=LR, momentum=0.0, max_grad_norm=None),
        store=tmp_path,
        device="cpu",
        activations=activations,
        micro_batch=micro_batch,
        weights="disk",
        device_memory="64MB",
        host_memory="3GB",
    )
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    for seed in range(STEPS):
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(seed))
        ours = model(x=x)
        ours.backward()
        optimizer.step()
        theirs = plain(x=x)
        theirs.backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    weights = read_parameters(model)
    close(model)
    for key, param in plain.named_parameters():
        torch.testing.assert_close(weights[key], param.detach(), rtol=1e-5, atol=1e-6, msg=key)
