"""Blocks that look at all rows of a batch are not cut into micro-batches, the others are."""

import copy

import pytest
import torch
from torch import nn

import reference
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared

LR = 1e-3


class Counted(nn.Module):
    """A table whose gradients are divided by how often an index is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x[..., 0] > 0).long())


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), norm  # a norm takes any bias out again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


BLOCKS = {
    "batch norm": (lambda: Normed(nn.BatchNorm1d(8)), 1),
    "batch norm that keeps nothing": (lambda: Normed(nn.BatchNorm1d(8, track_running_stats=False)), 1),
    "batch norm at rest": (lambda: Normed(nn.BatchNorm1d(8).eval()), 2),
    "instance norm": (lambda: Normed(nn.InstanceNorm1d(8, affine=True)), 2),
    "group norm": (lambda: Normed(nn.GroupNorm(2, 8)), 2),
    "counted indices": (Counted, 1),
}


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[kind][0]() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_cut_batch_gives_what_a_whole_one_gives(kind: str) -> None:
    torch.manual_seed(0)
    plain = Stack(kind)
    batches = [torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), spillway.AdamW(lr=LR, eps=reference.EPS), device="cpu", micro_batch=2
    )
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert {shape.chunks for shape in prepared(model).session.engine.in_force.shapes} == {BLOCKS[kind][1]}
    expected = reference.train(plain, [[{"x": batch}] for batch in batches], LR, 1.0)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
    close(model)
