"""Gradients of several backwards whose sum rests on the drives: only their place changes, never a bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import models
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.plan import make
from spillway.plan.search import Search, Timed

SPILLED = (0, 2, 4)
# Of each optimizer step, whether its backwards reach every unit: two of them stop at the first block.
STEPS = ((True, True, True), (True,), (False, True), (True, False))


class Spilling(Search):
    """Finds plans that sum the gradients of some units on the drives, and read them for updates in small parts."""

    def run(self) -> Timed:
        placement = super().run().candidate.placement
        units = [
            replace(where, grads="disk") if unit in SPILLED else where for unit, where in enumerate(placement.units)
        ]
        late = [unit for unit, where in enumerate(units) if placement.update == "deferred" or where.defers]
        return self._simulate(self._candidates.of(replace(placement, units=tuple(units), subgroup=4096), late))


def trained(
    store: Path, update: str, states: str, max_grad_norm: float | None, spilled: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-2, max_grad_norm=max_grad_norm),
        store=store,
        device="cpu",
        update=update,
        weights="host",
        states=states,
        gradient_accumulation_steps=2,
    )
    number = 0
    for reaches in STEPS:
        for is_whole in reaches[:-1]:
            with spillway.no_sync(model):
                backward(model, number, is_whole)
            number += 1
        backward(model, number, reaches[-1])
        number += 1
        optimizer.step()
    params, plan = read_parameters(model), prepared(model).session.engine.in_force.plan
    assert tuple(op.unit for op in plan.ops if (op.kind, op.group) == ("READ", "grad")) == spilled[::-1]
    assert not any((op.kind, op.group) == ("READ", "grad") for op in plan.begin_ops)
    close(model)
    return params


def backward(model: torch.nn.Module, number: int, is_whole: bool) -> None:
    output = model(**models.batch("llama", number), output_hidden_states=True)
    (output.loss if is_whole else output.hidden_states[1].square().mean()).backward()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("states", ("host", "disk"))
@pytest.mark.parametrize(
    ("update", "max_grad_norm"), [("serial", 1e-2), ("overlap", None), ("overlap", 1e-2), ("deferred", 1e-2)]
)
def test_where_sums_rest_changes_no_bit(
    update: str, max_grad_norm: float | None, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(tmp_path / "plain", update, states, max_grad_norm, ())
    monkeypatch.setattr(make, "Search", Spilling)
    found = trained(tmp_path / "spilled", update, states, max_grad_norm, SPILLED)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
