"""Forwards whose backward could not be computed as plain PyTorch would are refused, in a sentence."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import spillway
from spillway.spec.errors import UsageError


@dataclass
class Held:
    x: torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor | Held) -> torch.Tensor:
        return self.linear((x.x if isinstance(x, Held) else x) * 2).tanh()


class Chain(nn.Module):
    """Blocks between which something is done with what goes from one to the next."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.between = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3)), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.between(block, x)
        return x.square().mean()


def add_in_place(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x += block(x)
    return x


def prepared_chain(between: Any, **options: Any) -> nn.Module:
    model, _ = spillway.prepare(Chain(between), spillway.AdamW(), device="cpu", **options)
    return model


@pytest.mark.parametrize("activations", ("recompute", "tape"))
def test_an_input_that_is_changed_after_the_call(activations: str) -> None:
    model = prepared_chain(add_in_place, activations=activations)
    with pytest.raises(UsageError, match=r"an input or output of Block\.forward .* was changed in place"):
        model(torch.ones(2, 8)).backward()
    spillway.close(model)


class Saving(Block):
    """Autograd saves its input, and its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Two(nn.Module):
    """Gives what comes of an operator that a tape keeps, and what is made of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.linear(x)
        return made, made.sigmoid()


def change_output(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x)
    y += x
    return y


def change_one_of_two(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made, changed = block(x)
    made += 1
    return made * changed


@pytest.mark.parametrize("kind", (lambda: nn.Linear(8, 8), Two), ids=("all", "one of two"))
def test_what_a_tape_holds_and_the_model_changes_is_computed_again(kind: Callable[[], nn.Module]) -> None:
    plain = Chain(change_one_of_two if kind is Two else change_output)
    plain.blocks = nn.ModuleList(kind() for _ in range(3))
    model, x = copy.deepcopy(plain), torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
    expected = torch.autograd.grad(plain(x), [x])
    spillway.prepare(model, spillway.AdamW(), device="cpu", activations="tape")
    model(x).backward()
    torch.testing.assert_close([x.grad], list(expected))
    spillway.close(model)


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep", "host"))
@pytest.mark.parametrize(
    ("kind", "between"), ((Saving, add_in_place), (Saving, change_output), (Two, change_one_of_two))
)
def test_what_is_changed_after_the_call_is_refused_or_as_in_plain_pytorch(
    activations: str, kind: type[nn.Module], between: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    plain = Chain(between)
    plain.blocks = nn.ModuleList(kind() for _ in range(3))
    model, x, grads = copy.deepcopy(plain), torch.linspace(-1, 1, 16).view(2, 8).requires_grad_(), []
    try:
        grads = torch.autograd.grad(plain(x), [x])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    spillway.prepare(model, spillway.AdamW(), device="cpu", activations=activations)
    try:
        model(x).backward()
    except UsageError as error:
        assert "was changed in place" in str(error)
    else:
        # What plain PyTorch refuses may be right here, where the bytes were moved away before they were changed.
        expected = grads or torch.autograd.grad(out_of_place(plain, x), [x])
        torch.testing.assert_close([x.grad], list(expected))
    spillway.close(model)


def out_of_place(plain: Chain, x: torch.Tensor) -> torch.Tensor:
    """What `add_in_place` and `change_output` say, without changing what is needed."""
    x = plain.first(x)
    for block in plain.blocks:
        x = x + block(x)
    return x.square().mean()


def test_an_input_that_is_changed_after_the_call_is_kept_where_all_is() -> None:
    model, plain = prepared_chain(add_in_place, activations="keep"), Chain(add_in_place)
    loss, expected = model(torch.ones(2, 8)), plain(torch.ones(2, 8))
    loss.backward()
    assert loss.item() == expected.item()
    spillway.close(model)


def test_an_argument_that_hides_tensors() -> None:
    model = prepared_chain(lambda block, x: block(Held(x)))
    with pytest.raises(UsageError, match=r"Block\.forward was given a Held that holds tensors with gradients"):
        model(torch.ones(2, 8))
    spillway.close(model)


def test_a_hook_on_the_gradient_of_a_parameter() -> None:
    model = Chain(lambda block, x: block(x))
    model.first.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(UsageError, match=r"first\.weight has a hook on its gradient"):
        spillway.prepare(model, spillway.AdamW(), device="cpu")


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_a_unit_that_reads_buffers_it_changes_is_computed_again_from_the_old_ones(activations: str) -> None:
    def normed() -> Chain:
        model = Chain(lambda block, x: block(x))
        for block in model.blocks:
            spectral_norm(block.linear)
        return model

    model, _ = three_steps_beside_plain_pytorch(normed, activations)
    spillway.close(model)


def three_steps_beside_plain_pytorch(make: Callable[[], nn.Module], activations: str) -> tuple[nn.Module, nn.Module]:
    """The model of the same seed twice, after three equal steps."""
    plain = make()
    model, optimizer = spillway.prepare(
        make(), spillway.SGD(lr=0.1, momentum=0.0, max_grad_norm=None), device="cpu", activations=activations
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        loss, expected = model(x), plain(x)
        torch.testing.assert_close(loss.item(), expected.item(), rtol=1e-6, atol=0)
        for each, step in ((loss, optimizer), (expected, other)):
            each.backward()
            step.step()
        other.zero_grad()
    trained = spillway.api.read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(trained[name], param.detach(), rtol=1e-5, atol=1e-6, msg=name)
    return model, plain


class Counting(nn.Module):
    """What it gives depends on how often it was called, and on a list and a tensor that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.seen: list[int] = []
        self.total = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.total += 1
        return self.linear(x) * (1 + 0.1 * self.calls + 0.1 * len(self.seen) + 0.1 * self.total)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Counting() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_what_a_forward_counts_counts_once_and_backward_sees_it_as_the_forward_did(activations: str) -> None:
    model, plain = three_steps_beside_plain_pytorch(Counted, activations)
    for block, known in zip(model.blocks, plain.blocks, strict=True):
        assert (block.calls, block.seen, block.total) == (known.calls, known.seen, known.total) == (3, [1, 2, 3], 3)
    spillway.close(model)


class LateCounting(Counting):
    """Begins to count with its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("given", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.flatten()[0]) > 1.0:  # in the third batch only
            self.given += 1
            self.calls += 1
        return self.linear(x) * (1 + 0.5 * self.given + 0.5 * self.calls)


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_a_block_that_begins_to_change_what_it_keeps_is_seen_when_it_does(activations: str) -> None:
    def late() -> nn.Module:
        model = Counted()
        model.blocks = nn.ModuleList([Counting(), LateCounting()])
        return model

    plain, model = late(), late()
    model.load_state_dict(plain.state_dict())
    _, optimizer = spillway.prepare(
        model, spillway.SGD(lr=0.1, momentum=0.0, max_grad_norm=None), device="cpu", activations=activations
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(4):
        x = torch.full((2, 8), 5.0 if number > 1 else 0.1)
        loss, expected = model(x), plain(x)
        loss.backward()
        expected.backward()
        optimizer.step()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(loss.item(), expected.item(), rtol=1e-5, atol=0)
    assert model.blocks[1].given == plain.blocks[1].given > 0
    spillway.close(model)


def test_weights_that_are_first_wanted_in_inference_mode_can_be_trained_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model, optimizer = spillway.prepare(
        Chain(lambda block, x: block(x)), spillway.AdamW(), device="cpu", store=tmp_path, weights="disk"
    )
    with torch.inference_mode():
        before = model(torch.ones(2, 8)).item()
    model(torch.ones(2, 8)).backward()
    optimizer.step()
    with torch.inference_mode():
        assert model(torch.ones(2, 8)).item() != before
    spillway.close(model)


class Clamped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Bounded(nn.Module):
    """Rows of an embedding that the forward makes shorter where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 8, max_norm=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).square().mean()


class LooksAtValues(Clamped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize("block", (Clamped, LooksAtValues))
def test_a_block_that_changes_its_weights(block: type[Block]) -> None:
    model, _ = spillway.prepare(nn.Sequential(block(), Block()), spillway.AdamW(), device="cpu")
    with pytest.raises(UsageError, match=r"(0.linear.weight|model) is changed by its own forward"):
        model(torch.ones(2, 8))
    spillway.close(model)


def test_an_embedding_with_a_largest_norm() -> None:
    model, _ = spillway.prepare(Bounded(), spillway.AdamW(), device="cpu")
    with pytest.raises(UsageError, match=r"rows.weight is changed by its own forward \(max_norm"):
        model(torch.tensor([0, 1]))
    spillway.close(model)


def as_it_is(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def test_gradients_of_gradients() -> None:
    model = prepared_chain(as_it_is)
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(UsageError, match="create_graph=True asks for gradients of gradients"):
        torch.autograd.grad(model(x), x, create_graph=True)
    spillway.close(model)


def test_gradients_of_inputs_alone_train_nothing() -> None:
    model, optimizer = spillway.prepare(Chain(as_it_is), spillway.AdamW(), device="cpu")
    before = spillway.api.read_parameters(model)
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(UsageError, match=r"torch\.autograd\.grad wants the gradients of inputs alone"):
        torch.autograd.grad(model(x), x)
    assert all(torch.equal(before[name], found) for name, found in spillway.api.read_parameters(model).items())
    model(x).backward()  # and what follows is a step
    optimizer.step()
    assert x.grad is not None and optimizer.num_steps == 1
    spillway.close(model)


def test_a_loss_of_what_a_hook_kept_of_the_planning() -> None:
    model = prepared_chain(as_it_is)
    kept: list[torch.Tensor] = []
    hook = model.get_submodule("blocks.1").register_forward_hook(lambda module, args, output: kept.append(output))
    loss = model(torch.ones(2, 8)) + sum(output.mean() for output in kept)
    with pytest.raises(UsageError, match=r"placeholder \(fake\) tensor that a hook kept"):
        loss.backward()
    hook.remove()
    model.register_forward_pre_hook(lambda *_: kept.clear())
    model.get_submodule("blocks.1").register_forward_hook(lambda module, args, output: kept.append(output))
    (model(torch.ones(3, 8)) + sum(output.mean() for output in kept)).backward()
    assert len(kept) == 1
    spillway.close(model)


@pytest.mark.parametrize("when", ("before the first step", "after it"))
@pytest.mark.parametrize("what", ("a block", "another head", "a parameter"))
def test_what_comes_into_the_model_after_prepare(what: str, when: str) -> None:
    model, optimizer = spillway.prepare(Chain(as_it_is), spillway.AdamW(), device="cpu")
    if when == "after it":
        model(torch.ones(2, 8)).backward()
        optimizer.step()
    if what == "a block":
        model.blocks.append(Block())
    elif what == "another head":
        model.first = nn.Linear(8, 8)
    else:
        model.bias = nn.Parameter(torch.ones(8))
    with pytest.raises(UsageError, match=r"(blocks\.3|first|bias)\S* came into the model after prepare"):
        model(torch.ones(2, 8))
    spillway.close(model)


class Scaled(Chain):
    """Whose scale is used outside of any block."""

    def __init__(self) -> None:
        super().__init__(as_it_is)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


@pytest.mark.parametrize("when", ("before the first step", "after it", "after a forward without gradients"))
@pytest.mark.parametrize("name", ("scale", "blocks.0.linear.weight"))
def test_a_parameter_that_is_replaced_after_prepare(name: str, when: str) -> None:
    model, optimizer = spillway.prepare(Scaled(), spillway.AdamW(), device="cpu")
    if when != "before the first step":
        model(torch.ones(2, 8)).backward()
        optimizer.step()
    if when == "after a forward without gradients":
        with torch.no_grad():
            model(torch.ones(2, 8))
        model(torch.ones(2, 8)).backward()  # what that one left is ours
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 8))
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    known = getattr(module, attribute)
    setattr(module, attribute, nn.Parameter(torch.ones(known.shape)))
    with pytest.raises(UsageError, match=f"{name} was replaced by another parameter after prepare"):
        model(torch.ones(2, 8))
    spillway.close(model)


class Giving(Block):
    """A block that also returns what only it knows, or writes into a list that it is given twice or with others."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, kept: Any, again: Any = None) -> Any:
        y = super().forward(x)
        if self.how != "an object":
            kept.append(y.square().mean())
        return Held(y) if self.how == "an object" else y


class Given(nn.Module):
    def __init__(self, how: str, freezes: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.how = nn.Linear(8, 8), nn.ModuleList([Giving(how)]), how
        self.first.requires_grad_(not freezes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: Any = [[]] if self.how == "a list of lists" else []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, kept, kept if self.how == "a list given twice" else None)
        return (x.x if isinstance(x, Held) else x).square().mean() + sum(kept[1:])


@pytest.mark.parametrize("freezes", (False, True))
@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
@pytest.mark.parametrize(
    ("how", "words"),
    (
        ("a list given twice", "writes into a list or dict that it was given in two places"),
        ("a list of lists", "or that holds others"),
        ("an object", "returned a Held"),
    ),
)
def test_what_a_block_gives_by_another_way_than_its_result(
    how: str, words: str, activations: str, freezes: bool
) -> None:
    model, _ = spillway.prepare(Given(how, freezes), spillway.AdamW(), device="cpu", activations=activations)
    with pytest.raises(UsageError, match=words):
        model(torch.ones(4, 8)).backward()
    spillway.close(model)
