"""What is on the tape is not run again, whatever happens to it in between."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.model.operators import class_of
from spillway.model.profile import CallShape
from spillway.runtime.calls import flatten_call, run_backward, run_forward
from spillway.runtime.device import CpuDevice
from spillway.runtime.held import Outgoing
from spillway.runtime.tape import Tape
from spillway.spec.sizes import PAGE

WEIGHT = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
CPU = CpuDevice()
INPUT = torch.sin(torch.arange(8 * 32 * 64.0)).view(8, 32, 64)


class Count(TorchDispatchMode):
    """How often operators of each class run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = class_of(func, args, kwargs or {})
        if name is not None and "backward" not in str(func):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def product(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(functional.linear(x, WEIGHT)).square()


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    hidden = functional.linear(x, WEIGHT)
    hidden.add_(x)
    return hidden.relu_() * x


def viewed(x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, WEIGHT).view(8, 32, 4, 16).transpose(1, 2).contiguous().exp()


def attention(x: torch.Tensor) -> torch.Tensor:
    q = functional.linear(x, WEIGHT).view(-1, 32, 4, 16).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(q, q * 0.5, q.tanh(), is_causal=True)
    return mixed.transpose(1, 2).reshape(-1, 32, 64).tanh()


def dropped(x: torch.Tensor) -> torch.Tensor:
    hidden = functional.dropout(functional.linear(x, WEIGHT), 0.3)
    return functional.dropout(functional.linear(hidden, WEIGHT), 0.3) * x


def dropped_attention(x: torch.Tensor) -> torch.Tensor:
    q = functional.linear(x, WEIGHT).view(-1, 32, 4, 16).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    return functional.dropout(mixed.transpose(1, 2).reshape(-1, 32, 64), 0.3)


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(x, WEIGHT).float().sin()


def grads(function: Callable[..., torch.Tensor], tape: Tape | None, slab: bool) -> tuple[list[torch.Tensor], Counter]:
    """Gradients of input and weight through our forward and backward, and what backward ran."""
    torch.manual_seed(3)
    WEIGHT.grad = None
    x = INPUT.clone().requires_grad_()
    call, tensors = flatten_call(function, (x,), {})
    none: frozenset[int] = frozenset()
    chunks = (2, 4, frozenset([0]), frozenset([0])) if function is not viewed else (1, 0, none, none)
    shape = CallShape(0, "unit", "FORWARD", *chunks, (0,), frozenset({0}), frozenset({0}))
    slot = torch.zeros(PAGE, dtype=torch.uint8)
    outputs, _, replay = run_forward(call, shape, tensors, CPU, 2, slot, (), None, tape)
    if tape is not None and slab:
        outgoing = Outgoing("unit", 1 << 24)
        outgoing.put(torch.zeros(PAGE, dtype=torch.uint8), [])  # an input of the call
        tape.release(outgoing)
        home = torch.zeros(1 << 24, dtype=torch.uint8)
        for at, content in outgoing.moves[1:]:
            home[at : at + content.numel()].copy_(content)
            content.fill_(255)  # its memory serves another
        tape.bring_back(home)
    ones = torch.ones_like(outputs[0])
    with Count() as count:
        found = run_backward(call, shape, tensors, [True], [ones], replay, tape, CPU, 2)
    return [found[0], WEIGHT.grad.clone()], count.seen


@pytest.mark.parametrize("slab", (False, True))
@pytest.mark.parametrize("function", (product, changed_in_place, viewed, attention, dropped, autocast))
def test_gradients_are_the_same_bits_and_no_taped_operator_runs_again(
    function: Callable[..., torch.Tensor], slab: bool
) -> None:
    expected, _ = grads(function, None, False)
    found, ran = grads(function, Tape(("matmul 64", "attention")), slab)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with Count() as forward:
        function(INPUT)
    chunks = 1 if function is viewed else 2
    # Each product has two in backward, which the tape has nothing to do with.
    products = sum(count for name, count in forward.seen.items() if name.startswith("matmul"))
    assert sum(count for name, count in ran.items() if name.startswith("matmul")) == 2 * products * chunks
    assert ran["attention"] == 0


@pytest.mark.parametrize("chunks", (1, 2))
@pytest.mark.parametrize("is_taped", (False, True))
@pytest.mark.parametrize("moves", (False, True))
def test_only_what_is_on_the_tape_waits_on_the_device(chunks: int, is_taped: bool, moves: bool) -> None:
    made: list[Any] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, WEIGHT)
        result = hidden if is_taped else x + hidden
        made.append(weakref.ref(result.untyped_storage()))
        return result

    call, tensors = flatten_call(block, (INPUT.clone().requires_grad_(),), {})
    rows = frozenset([0])
    shape = CallShape(
        0, "unit", "FORWARD", chunks, len(INPUT) // chunks, rows, rows, (0,), frozenset({0}), frozenset({0})
    )
    tape = Tape(("matmul 64",))
    run_forward(call, shape, tensors, CPU, 1, torch.zeros(PAGE, dtype=torch.uint8), (), None, tape)
    if moves:
        tape.release(Outgoing("unit", 1 << 24))
    gc.collect()
    assert sum(storage() is not None for storage in made) == (chunks if is_taped and not moves else 0)


@pytest.mark.parametrize("tape", (None, Tape(("matmul 64",))))
def test_what_a_block_keeps_out_of_autocast_is_differentiated_out_of_it(tape: Tape | None) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + functional.linear(x, WEIGHT).tanh()

    ones, none = torch.ones_like(INPUT), frozenset[int]()
    WEIGHT.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        plain = block(INPUT)
    plain.backward(ones)
    expected, WEIGHT.grad = WEIGHT.grad, None
    call, tensors = flatten_call(block, (INPUT.clone(),), {})
    shape = CallShape(0, "unit", "FORWARD", 1, 0, none, none, (0,), frozenset({0}), frozenset({0}))
    with torch.autocast("cpu", torch.bfloat16):
        _, _, replay = run_forward(call, shape, tensors, CPU, 1, torch.zeros(PAGE, dtype=torch.uint8), (), None, tape)
    run_backward(call, shape, tensors, [False], [ones], replay, tape, CPU, 1)
    assert expected is not None and WEIGHT.grad is not None and torch.equal(WEIGHT.grad, expected)


def test_attention_that_drops_at_random_runs_again() -> None:
    expected, _ = grads(dropped_attention, None, False)
    found, _ = grads(dropped_attention, Tape(("matmul 64", "attention")), False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_only_the_chosen_classes_are_kept() -> None:
    _, ran = grads(attention, Tape(("attention",)), False)
    assert ran["attention"] == 0
    assert ran["matmul 64"] == 2 * (1 + 1)  # of two micro-batches: again, and for the gradient of the input
