"""Profiles of models whose blocks are alike, told without making every call."""

from typing import Any

import pytest
import torch
from torch import nn

import models
from spillway.model.alike import AlikeCalls
from spillway.planning.profiler import ModelProfiler
from spillway.spec.errors import UsageError
from spillway.spec.model import ModelProfile

BLOCKS = 20


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return x + self.linear(x).relu()


class Stack(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def profile(model: nn.Module, batch: dict[str, Any], micro_batch: int | None = None) -> ModelProfile:
    return ModelProfiler(model).of(batch, micro_batch)


def with_every_call(monkeypatch: pytest.MonkeyPatch, *asked: Any) -> ModelProfile:
    with monkeypatch.context() as patch:
        patch.setattr(AlikeCalls, "known", lambda self, key: None)
        return profile(*asked)


def x() -> dict[str, Any]:
    return {"x": torch.randn(4, 8)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", models.MODELS)
def test_a_profile_is_what_it_is_with_every_call_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = models.batch(name, 0)
    whole = with_every_call(monkeypatch, models.MODELS[name](), batch, 2)
    assert profile(models.MODELS[name](), batch, 2) == whole


class Counted(Block):
    times = 0

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        Counted.times += 1
        return super().forward(x)


def test_of_many_blocks_few_are_called() -> None:
    Counted.times = 0
    Counted.times = 0
    found = profile(Stack([Counted(index) for index in range(BLOCKS)]), x())
    assert len(found.calls) == BLOCKS
    # The first, whose input needs no gradient; of the others the first six, the eighth and the sixteenth; and of each
    # kind one alone, for what it takes while it computes.
    assert Counted.times == 1 + 8 + 2


def test_of_kinds_that_were_alike_one_is_called_for_other_rows_and_lengths() -> None:
    Counted.times = 0
    profiler = ModelProfiler(Stack([Counted(index) for index in range(BLOCKS)]))
    profiler.of(x(), 2)
    assert Counted.times == (1 + 8) + (1 + 1) + 2  # the batch, a row more, and what a call takes
    profiler.of({"x": torch.randn(9, 8)}, None)
    assert Counted.times == (1 + 8) + (1 + 1) + 2 + (1 + 1) + 2


def test_for_cutting_the_batch_one_of_each_kind_is_called_once_more() -> None:
    Counted.times = 0
    profile(Stack([Counted(index) for index in range(BLOCKS)]), x(), 2)
    assert Counted.times == 1 + 8 + 2 + 2


class Kinds(Block):
    """What it does depends on an attribute."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.is_wide = index % 3 == 0

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return x + self.linear(torch.cat([x, x])).relu()[: len(x)] if self.is_wide else super().forward(x)


class Numbered(Block):
    """What it does depends on its number."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return x + self.linear(torch.cat([x, x])).relu()[: len(x)] if self.layer_idx > 5 else super().forward(x)


class EverySixth(Block):
    """What it does depends on its number, now and then."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return x + self.linear(torch.cat([x, x])).relu()[: len(x)] if self.layer_idx % 6 == 5 else super().forward(x)


class Viewing(Block):
    """Every other one gives what lies in the memory of what it was given."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return super().forward(x) if self.layer_idx % 2 else x.view(-1, 8)


class Writing(Block):
    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return x + self.linear(x) if self.layer_idx == 0 else x.add_(self.linear(x.clone()))


class Holding(Block):
    """Leaves a loss on itself."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        self.penalty = x.square().mean()
        return super().forward(x)


class Penalised(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(block.penalty for block in self.blocks)  # type: ignore[misc]


class Collecting(Block):
    """Leaves something in a list that it was given."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        extra.append(x)
        return super().forward(x)


class Collected(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, found)
        return x.sum() + len(found)


@pytest.mark.parametrize("block", [Block, Kinds, Numbered, EverySixth, Viewing])
def test_what_a_block_does_is_seen(block: type[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Stack:
        return Stack([block(index) for index in range(BLOCKS)])

    profiler = ModelProfiler(make())
    for batch, micro_batch in ((x(), None), (x(), 2), ({"x": torch.randn(9, 8)}, 3)):
        assert profiler.of(batch, micro_batch) == with_every_call(monkeypatch, make(), batch, micro_batch)


def test_blocks_that_are_not_alike_have_profiles_of_their_own() -> None:
    for block, few in ((Kinds, 7), (Numbered, 14), (EverySixth, 3)):
        found = profile(Stack([block(index) for index in range(BLOCKS)]), x())
        assert sum(call.flops == max(call.flops for call in found.calls) for call in found.calls) == few


def test_a_forward_that_was_put_into_a_part_is_seen() -> None:
    def wider(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.cat([x, x]), odd.weight, odd.bias)[: len(x)]

    model = Stack([Block(index) for index in range(BLOCKS)])
    odd = model.blocks[12].linear
    odd.forward = wider  # type: ignore[method-assign]
    calls = profile(model, x()).calls
    assert [index for index, call in enumerate(calls) if call.flops > calls[0].flops] == [12]


def test_a_block_that_changes_its_input_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Writing\.forward changes one of its inputs in place.*copy"):
        profile(Stack([Writing(index) for index in range(BLOCKS)]), x())


@pytest.mark.parametrize(("block", "stack"), [(Holding, Penalised), (Collecting, Collected)])
def test_what_blocks_leave_elsewhere_is_left(
    block: type[Block], stack: type[Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Stack:
        return stack([block(index) for index in range(BLOCKS)])

    assert profile(make(), x()) == with_every_call(monkeypatch, make(), x())
