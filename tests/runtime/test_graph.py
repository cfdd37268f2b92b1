"""What autograd recorded of a call survives a journey of its bytes, and does not hold them meanwhile."""

import gc
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import models
import spillway
from spillway.api import close
from spillway.model.units import Unit
from spillway.runtime.graph import Graph
from spillway.runtime.held import Outgoing
from spillway.runtime.window import Gradients
from spillway.spec.sizes import PAGE
from spillway.store.layout import lay_out

UNIT = Unit("linear", (), (), lay_out([("weight", (8, 8), torch.float32, True)]))


def forward(slot: torch.Tensor, moves: bool) -> tuple[Graph, torch.Tensor, torch.Tensor]:
    """A small unit with its weight in a slot: the graph, the input's leaf and the output."""
    weight = slot[:256].view(torch.float32).view(8, 8).requires_grad_()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    graph = Graph("linear", slot, {"weight": weight}, [x], [], moves)
    with torch.autograd.graph.saved_tensors_hooks(graph.pack, graph.unpack):
        output = functional.gelu(functional.linear(x.clone(), weight)).square()
    graph.note([x], [output])
    return graph, x, output.detach().clone()


def slot_of(values: torch.Tensor) -> torch.Tensor:
    slot = torch.zeros(PAGE, dtype=torch.uint8)
    slot[:256].view(torch.float32).view(8, 8).copy_(values)
    return slot


def released(graph: Graph, capacity: int) -> list[tuple[int, torch.Tensor]]:
    outgoing = Outgoing(graph.name, capacity)
    graph.release(outgoing)
    return outgoing.moves


@pytest.mark.parametrize("moves", (False, True))
def test_backward_uses_the_slot_and_the_slab_it_is_given(moves: bool) -> None:
    values = torch.arange(64.0).view(8, 8) / 64
    plain_weight, plain_x = values.clone().requires_grad_(), torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    functional.gelu(functional.linear(plain_x, plain_weight)).square().sum().backward()

    slot = slot_of(values)
    graph, x, _ = forward(slot, moves)
    slab = None
    if moves:
        slab = torch.zeros(9 * PAGE, dtype=torch.uint8)[PAGE:]
        for at, content in released(graph, 8 * PAGE):
            slab[at : at + content.numel()].copy_(content)
        del content
    slot.fill_(255)  # another unit was there
    grads = torch.full((PAGE,), 255, dtype=torch.uint8)  # and its gradients
    gradients = Gradients(UNIT, grads, is_fresh=True)
    graph.bring_back(slot_of(values), gradients, slab)
    inputs, roots = graph.take(0)
    torch.autograd.backward([root.edge for root in roots], [torch.ones(4, 8)])
    graph.close()
    gradients.finish()
    assert inputs[0] is x
    torch.testing.assert_close(x.grad, plain_x.grad)
    torch.testing.assert_close(grads[:256].view(torch.float32).view(8, 8), plain_weight.grad)
    assert not grads[256:].any()


def test_what_was_moved_is_not_held_on_the_device() -> None:
    graph, _, _ = forward(slot_of(torch.ones(8, 8)), moves=True)
    moved = released(graph, 8 * PAGE)
    watched = [StorageWeakRef(content.untyped_storage()) for _, content in moved]
    assert len(watched) >= 2
    del moved
    assert all(reference.expired() for reference in watched)


def test_what_has_no_room_in_the_slab_stays() -> None:
    graph, x, _ = forward(slot_of(torch.ones(8, 8)), moves=True)
    ((at, content),) = released(graph, PAGE)
    slab = torch.zeros(PAGE, dtype=torch.uint8)
    slab[at : at + content.numel()].copy_(content)
    graph.bring_back(slot_of(torch.ones(8, 8)), None, slab)
    _, roots = graph.take(0)
    torch.autograd.backward([root.edge for root in roots], [torch.ones(4, 8)])
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_forwards_that_no_backward_follows_leave_nothing_behind(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path / "s", device="cpu", activations="keep"
    )

    def graphs() -> int:
        gc.collect()
        return sum(type(thing) is Graph for thing in gc.get_objects())

    before = graphs()
    for number in range(4):
        model(**models.batch("llama", number))
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    close(model)
    assert graphs() == before
