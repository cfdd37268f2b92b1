"""Blocks that look at all rows of a batch are not cut into micro-batches, the others are."""

import copy
import functools
import weakref

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.model.profile import CallRecord
from spillway.runtime.forwards import Batch, Forwards
from spillway.spec.errors import UsageError
from spillway.spec.model import ModelProfile

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


class Routed(nn.Module):
    """Experts of which each computes the tokens that are sent to it, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        given = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)
            given[rows] = torch.tanh(expert(x[rows]))
        return x + scores[..., None] * given


BLOCKS = {
    "batch norm": (lambda: Normed(nn.BatchNorm1d(8)), 1),
    "batch norm that keeps nothing": (lambda: Normed(nn.BatchNorm1d(8, track_running_stats=False)), 1),
    "batch norm at rest": (lambda: Normed(nn.BatchNorm1d(8).eval()), 3),
    "instance norm": (lambda: Normed(nn.InstanceNorm1d(8, affine=True)), 3),
    "group norm": (lambda: Normed(nn.GroupNorm(2, 8)), 3),
    "counted indices": (Counted, 1),
    "experts by their tokens": (Routed, 3),
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
    batches = [torch.randn(5, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
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


def test_what_a_few_rows_tell_of_all_is_what_all_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def profiled() -> ModelProfile:
        model, _ = spillway.prepare(models.llama(), spillway.AdamW(), device="cpu", micro_batch=2)
        model(**models.batch("llama", 0, rows=5))
        schedule = prepared(model).session.engine.in_force
        close(model)
        return schedule.profile

    whole = profiled()
    monkeypatch.setattr(Forwards, "fake", looks_at_values)
    told = profiled()
    calls = [call for call in whole.calls if call.unit not in told.resident_units]  # small tables
    for call, other in zip(told.calls, calls, strict=True):
        assert (call.unit, call.kind, call.chunks, call.forks) == (other.unit, other.kind, other.chunks, other.forks)
        assert (call.act_bytes, call.flops) == (other.act_bytes, pytest.approx(other.flops))
        assert call.saved_bytes == pytest.approx(other.saved_bytes, rel=0.2, abs=1 << 16)
        assert call.work_bytes == pytest.approx(other.work_bytes, rel=0.2, abs=1 << 16)
    assert told.boundary_bytes == pytest.approx(whole.boundary_bytes, rel=0.05)


def looks_at_values(forwards: Forwards, batch: Batch) -> list[CallRecord]:
    raise RuntimeError("there are no values")


class Steps(nn.Module):
    """Calls a block more where there are many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: int(x.shape[0] * x.abs().max().sign().item())]:
            x = block(x)
        return x.square().mean()


def test_a_forward_that_calls_other_blocks_for_other_rows_cannot_be_cut() -> None:
    model, _ = spillway.prepare(Steps(), spillway.AdamW(), device="cpu", micro_batch=2)
    with pytest.raises(UsageError, match="calls other modules for other rows"):
        model(torch.ones(4, 8))
    close(model)


def test_a_forward_that_looks_at_values_is_profiled_without_holding_its_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[int] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(sum(of() is not None for of in given))
            given.append(weakref.ref(x))
            return super().forward(x)

    given: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(Forwards, "fake", looks_at_values)
    model = nn.Module()
    model.blocks = nn.ModuleList(Watched(8, 8) for _ in range(6))  # type: ignore[assignment]
    model.forward = lambda x: functools.reduce(lambda hidden, block: block(hidden), model.blocks, x).sum()  # type: ignore
    model, _ = spillway.prepare(model, spillway.AdamW(), device="cpu")
    model(torch.ones(4, 8))
    assert max(alive[: len(model.blocks)]) <= 2, alive
    close(model)
