"""Models that do something else with a batch than they did with the one of its shape that was planned: as in plain
PyTorch, or refused in a sentence."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import reference
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.spec.errors import UsageError

LR = 1e-3
ROWS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gives_more = False

    def forward(self, x: torch.Tensor) -> Any:
        found = x + torch.tanh(self.linear(x))
        return (found, found.sigmoid()) if self.gives_more else found


class Model(nn.Module):
    """`views`: so many of each row go through the blocks, of which the first `length` are called."""

    views = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.length = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.cat([x * (view + 1) for view in range(self.views)]))
        total = x.new_zeros(())
        for block in self.blocks[: self.length]:
            found = block(x)
            x, total = (found[0], total + found[1].mean()) if isinstance(found, tuple) else (found, total)
        return x.square().mean() + total


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(8)) for _ in range(3))


def x(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))


Change = Callable[[nn.Module, int], None]


def losses_of(model: nn.Module, step: Callable[[], object], change: Change) -> list[float]:
    losses = []
    for number in range(4):
        change(model, number)
        loss = model(x(number))
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def assert_as_in_pytorch(model: nn.Module, change: Change, **options: Any) -> None:
    plain = copy.deepcopy(model)
    settings = spillway.AdamW(lr=LR, eps=reference.EPS, max_grad_norm=None)
    model, optimizer = spillway.prepare(model, settings, device="cpu", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        losses = losses_of(model, optimizer.step, change)
    own = torch.optim.AdamW(reference.groups(plain, 0.01), lr=LR, eps=reference.EPS)

    def step() -> None:
        own.step()
        own.zero_grad()

    torch.testing.assert_close(losses, losses_of(plain, step, change), rtol=1e-5, atol=0)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-6, msg=name)
    close(model)


@pytest.mark.parametrize("views", ((1, 3, 2, 1), (2, 1, 1, 3)))
@pytest.mark.parametrize("activations", ("recompute", "keep", "host"))
def test_as_many_micro_batches_are_made_as_there_are_rows(views: tuple[int, ...], activations: str) -> None:
    def change(model: Any, step: int) -> None:
        model.views = views[step]

    assert_as_in_pytorch(Model(), change, micro_batch=2, activations=activations)


def test_the_next_step_is_planned_for_what_was_larger_than_planned() -> None:
    model, optimizer = spillway.prepare(Model(), spillway.AdamW(), device="cpu", micro_batch=2)

    def take(views: int) -> int:
        model.views = views  # type: ignore[assignment]
        model(x(0)).backward()
        optimizer.step()
        return sum(shape.elements for shape in prepared(model).session.engine.in_force.shapes)

    one = take(1)
    with pytest.warns(UserWarning, match=r"works on larger tensors than when a batch of this shape was planned"):
        assert take(2) == one
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert take(2) == take(1) == 2 * one
    close(model)


@pytest.mark.parametrize("micro_batch", (None, 2))
def test_parts_that_are_switched_to_training_are_another_plan(micro_batch: int | None) -> None:
    def change(model: Any, step: int) -> None:
        for block in model.blocks:
            block[1].train(step > 1)

    assert_as_in_pytorch(Normed(), change, micro_batch=micro_batch)


def give_more(model: Any, step: int) -> None:
    for block in model.blocks:
        block.gives_more = step > 1


def test_a_result_that_comes_later_is_trained_and_refused_of_micro_batches() -> None:
    assert_as_in_pytorch(Model(), give_more)
    with pytest.raises(UsageError, match="gives something else for a few rows than it did when its micro-batches were"):
        assert_as_in_pytorch(Model(), give_more, micro_batch=2)


class Counting(Block):
    """Gives a number besides: of how many rows there are, or one that depends on what is in them."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        number = x.shape[0] / 3 if self.of == "rows" else x.detach().abs().max().item()
        return x + torch.tanh(self.linear(x)), number


class Scaled(Model):
    def __init__(self, of: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting(of) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, number = block(x)
            x = x * number
        return x.square().mean()


@pytest.mark.parametrize("of", ("rows", "values"))
def test_a_block_that_gives_a_number_of_all_rows_is_not_cut(of: str) -> None:
    assert_as_in_pytorch(Scaled(of), lambda model, step: None, micro_batch=2)


@pytest.mark.parametrize("lengths", ((3, 2, 3, 3), (2, 3, 3, 3)))
def test_a_model_that_leaves_blocks_out_of_some_batches_is_refused(lengths: tuple[int, ...]) -> None:
    def change(model: Any, step: int) -> None:
        model.length = lengths[step]

    with pytest.raises(UsageError, match=r"is not computed when it was planned|where the profiled forward did not"):
        assert_as_in_pytorch(Model(), change)


class Scheduled(nn.Module):
    """Scales what it adds by what the model sets or advances, in its attributes and its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0
        self.register_buffer("time", torch.zeros(()))
        self.register_buffer("table", torch.ones(1 << 15), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale * (1 + self.time) * self.table[:8]


def set_before_each(block: Any, depth: int) -> None:
    block.scale = 1.0 + depth


def replace_after_each(block: Any, depth: int) -> None:
    block.time = block.time + 0.5


def write_after_each(block: Any, depth: int) -> None:
    with torch.no_grad():
        block.time.add_(0.5)


def write_a_table(block: Any, depth: int) -> None:
    with torch.no_grad():
        block.table.mul_(0.5)


class Universal(nn.Module):
    """One block, called three times."""

    def __init__(self, change: Callable[[Any, int], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.change = nn.Linear(8, 8), nn.ModuleList([Scheduled()]), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for depth in range(3):
            self.change(self.blocks[0], depth)
            x = self.blocks[0](x)
        self.change(self.blocks[0], 7)
        return x.square().mean()


@pytest.mark.parametrize("change", (set_before_each, replace_after_each, write_after_each))
@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_a_block_is_computed_again_with_what_the_model_had_set(
    change: Callable[[Any, int], None], activations: str
) -> None:
    assert_as_in_pytorch(Universal(change), lambda model, step: None, activations=activations)


def test_a_large_buffer_that_is_written_to_between_forward_and_backward_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a buffer of shape \(32768,\) was written to between the forward of its"):
        assert_as_in_pytorch(Universal(write_a_table), lambda model, step: None, activations="recompute")


class Stashing(Block):
    """Leaves something of its weights in an attribute."""

    def __init__(self, what: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.what, self.left = what, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left = self.what(self.linear.weight)
        return x + self.linear(x)


class Penalised(nn.Module):
    def __init__(self, what: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stashing(what) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean() + sum(block.left.square().sum() for block in self.blocks)  # type: ignore[misc,operator]


@pytest.mark.parametrize("activations", ("recompute", "keep"))
@pytest.mark.parametrize("what", (torch.t, torch.sum))
def test_weights_that_leave_a_block_by_an_attribute_are_refused(
    what: Callable[[torch.Tensor], torch.Tensor], activations: str
) -> None:
    with pytest.raises(UsageError, match=r"the loss depends on something that was computed within Stashing\.forward"):
        assert_as_in_pytorch(Penalised(what), lambda model, step: None, activations=activations)


class Conditioned(Block):
    def __init__(self) -> None:
        super().__init__()
        self.by: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.by


class Conditioning(nn.Module):
    """Hands what one block gives to the others by their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Conditioned() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = self.first(x)
        for block in self.blocks:
            block.by = by  # type: ignore[assignment]
            x = block(x)
        return x.mean()


def test_results_that_go_from_block_to_block_by_attributes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be computed by itself.*hand over as arguments what the model sets"):
        assert_as_in_pytorch(Conditioning(), lambda model, step: None)
