"""Gradients of several backwards, summed on the device where states rest there: the bits of sums elsewhere."""

from pathlib import Path

import pytest
import torch

import models
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared

BACKWARDS = 3


def trained(
    store: Path, name: str, states: str, update: str, max_grad_norm: float | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    model, optimizer = spillway.prepare(
        models.MODELS[name]().to(dtype),
        spillway.AdamW(lr=1e-2, max_grad_norm=max_grad_norm),
        store=store,
        device="cpu",
        update=update,
        weights=states,
        states=states,
        micro_batch=1,
        gradient_accumulation_steps=BACKWARDS,
    )
    for number in range(3 * BACKWARDS):
        models.loss_of(model(**models.batch(name, number))).backward()
        if number % BACKWARDS == BACKWARDS - 1:
            optimizer.step()
    params, plan = read_parameters(model), prepared(model).session.engine.in_force.plan
    residents = prepared(model).session.forwards.residents
    summed = {op.unit for op in plan.ops if (op.kind, op.lane) == ("ACCUMULATE", "device")}
    updated = {op.unit for op in (*plan.begin_ops, *plan.ops) if op.kind == "UPDATE"}
    assert summed == (updated - residents if states == "device" else set())
    close(model)
    return params


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ("llama", "gpt2", "t5", "partly_frozen"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("update", "max_grad_norm"), [("serial", 1e-2), ("overlap", None), ("deferred", 1e-2)])
def test_where_states_rest_changes_no_bit_of_a_step_of_several_backwards(
    name: str, dtype: torch.dtype, update: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    found, expected = (
        trained(tmp_path / states, name, states, update, max_grad_norm, dtype) for states in ("device", "host")
    )
    assert all(torch.equal(found[key], expected[key]) for key in expected)
