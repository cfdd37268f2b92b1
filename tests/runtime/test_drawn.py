"""Blocks that draw random numbers of any kind, or work in the complex plane: as in plain PyTorch."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

import spillway
from spillway.api import read_parameters


class Block(nn.Module):
    def __init__(self, draw: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.draw = draw
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn: dict[str, Callable[[], object]] = {
            "torch": lambda: torch.rand(8),
            "python": random.random,
            "numpy": lambda: float(numpy.random.rand()),
            "generator": lambda: torch.rand(8, generator=self.own),
        }
        return torch.tanh(self.linear(x)) * drawn[self.draw]()  # type: ignore[operator,no-any-return]


class Spectrum(nn.Module):
    """Hands on complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real = torch.fft.irfft(x, n=8) if x.is_complex() else x
        return torch.fft.rfft(self.linear(real).tanh())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    losses = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x).abs().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("activations", ("recompute", "keep"))
@pytest.mark.parametrize("kind", ("torch", "python", "numpy", "generator", "complex"))
def test_it_trains_as_plain_pytorch_does(kind: str, activations: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Spectrum() if kind == "complex" else Block(kind) for _ in range(3)))

    assert_as_in_pytorch(build, activations)


def assert_as_in_pytorch(build: Callable[[], nn.Module], activations: str) -> None:
    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    settings = spillway.AdamW(lr=1e-2, max_grad_norm=None, decay_all=True)
    model, optimizer = spillway.prepare(build(), settings, device="cpu", activations=activations)
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    found = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)
    spillway.close(model)


class Given(nn.Module):
    """Draws from a generator that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * torch.rand(8, generator=generator)


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Given() for _ in range(3))
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.generator)
        return x


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_a_generator_among_the_arguments_goes_on_as_in_plain_pytorch(activations: str) -> None:
    assert_as_in_pytorch(Handing, activations)
