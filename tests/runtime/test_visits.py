"""Updates made on the device of states that rest elsewhere, beside units that live there: only the lane changes."""

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
from spillway.spec.plan import Placement, UnitPlacement

LIVING, VISITING = (1, 2), (0, 3, 4)


class Together(Search):
    """Finds plans in which some units live on the device and the updates of others visit it."""

    def run(self) -> Timed:
        placement = super().run().candidate.placement
        units = list(placement.units)
        for unit in LIVING:
            units[unit] = UnitPlacement("device", "device", "device")
        late = [unit for unit, where in enumerate(units) if placement.update == "deferred" or where.defers]
        return self._simulate(self._candidates.of(replace(placement, units=tuple(units)), late, VISITING))


class Mixed(Search):
    """Finds plans that leave every other update to the next forward, and make some of both kinds on the device."""

    def run(self) -> Timed:
        placement = super().run().candidate.placement
        late = [unit for unit in range(len(placement.units)) if unit % 2 or placement.units[unit].defers]
        return self._simulate(self._candidates.of(placement, late, VISITING))


def trained(
    store: Path, update: str, states: str, max_grad_norm: float | None, accumulation: int = 1
) -> tuple[dict[str, torch.Tensor], Placement]:
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-2, max_grad_norm=max_grad_norm),
        store=store,
        device="cpu",
        update=update,
        weights="host",
        states=states,
        gradient_accumulation_steps=accumulation,
    )
    for number in range(4 * accumulation):
        (model(**models.batch("llama", number)).loss / accumulation).backward()
        if number % accumulation == accumulation - 1:
            optimizer.step()
    params, placement = read_parameters(model), prepared(model).session.engine.in_force.plan.placement
    close(model)
    return params, placement


@pytest.mark.sampled(2)
@pytest.mark.parametrize("states", ("host", "disk"))
@pytest.mark.parametrize(("update", "max_grad_norm"), [("serial", 1e-2), ("overlap", None), ("deferred", 1e-2)])
def test_units_that_live_on_the_device_beside_updates_that_visit_it_have_the_same_bits(
    update: str, max_grad_norm: float | None, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, plain = trained(tmp_path / "plain", update, states, max_grad_norm)
    monkeypatch.setattr(make, "Search", Together)
    found, placement = trained(tmp_path / "together", update, states, max_grad_norm)
    assert not plain.visits and [placement.units[unit].states for unit in LIVING] == ["device"] * len(LIVING)
    assert [placement.units[unit].visits for unit in VISITING] == [True] * len(VISITING)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("states", ("host", "disk"))
@pytest.mark.parametrize("max_grad_norm", (None, 1e-2, 1e3))
def test_steps_of_several_backwards_may_leave_some_updates_to_the_first_forward_of_the_next(
    states: str, max_grad_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = trained(tmp_path / "plain", "serial", states, max_grad_norm, accumulation=3)
    monkeypatch.setattr(make, "Search", Mixed)
    found, placement = trained(tmp_path / "mixed", "overlap", states, max_grad_norm, accumulation=3)
    late = [where.defers for where in placement.units]
    assert any(late) and (not all(late) or (max_grad_norm is not None and states == "host"))
    assert [placement.units[unit].visits for unit in VISITING] == [True] * len(VISITING)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("accumulation", (1, 2))
def test_a_step_of_which_a_part_is_made_is_not_looked_at(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "Search", Mixed)
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=1e-2, max_grad_norm=None), store=tmp_path, device="cpu", update="overlap",
        weights="host", states="disk", gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    for number in range(accumulation):
        model(**models.batch("llama", number)).loss.backward()
    with torch.no_grad(), pytest.raises(spillway.UsageError, match=r"call optimizer.step\(\) first"):
        model(**models.batch("llama", 9))
    optimizer.step()
    with torch.no_grad():
        model(**models.batch("llama", 9))
    close(model)
