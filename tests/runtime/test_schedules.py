"""A plan per shape of batch, made once, and not kept for ever."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import spillway
from spillway.api import close
from spillway.assembly import prepared
from spillway.plan.memory import peaks
from spillway.plan.pools import Kinds
from spillway.runtime import schedules
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan, TierPeaks


def test_of_many_lengths_those_asked_for_last_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_REMEMBERED", 3)
    model, _ = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    session = prepared(model).session
    batches = {length: models.batch("llama", 0, length=length) for length in (4, 5, 6, 7)}
    made = {length: session.schedules.of((), batches[length]) for length in (4, 5, 6)}
    assert all(session.schedules.of((), batches[length]) is made[length] for length in (5, 6, 4))
    session.schedules.of((), batches[7])
    assert all(session.schedules.of((), batches[length]) is made[length] for length in (6, 4))
    assert session.schedules.of((), batches[5]) is not made[5]
    close(model)


class Names:
    """Of the samples of a batch; says nothing of its content."""


class TakesNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows: torch.Tensor, names: Names) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows.sum()


def test_an_object_that_is_made_anew_for_each_batch_is_no_new_shape(tmp_path: Path) -> None:
    model, _ = spillway.prepare(TakesNames(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    given, rows = [Names() for _ in range(3)], torch.ones(2, 4)
    made = [prepared(model).session.schedules.of((rows, names), {}) for names in given]
    assert made[0] is made[1] is made[2]
    close(model)


class LooksFirst(TakesNames):
    """Calls a block without gradients, too."""

    def forward(self, rows: torch.Tensor, names: Names) -> torch.Tensor:
        with torch.no_grad():
            scale = self.blocks[0](rows).abs().mean()
        return super().forward(rows * scale, names)


@pytest.mark.parametrize("weights", ("host", "disk"))
def test_a_unit_that_is_also_called_without_gradients_has_room_beside_the_step(weights: str, tmp_path: Path) -> None:
    model, _ = spillway.prepare(LooksFirst(), spillway.AdamW(), store=tmp_path, device="cpu", weights=weights)
    session = prepared(model).session
    model(torch.ones(2, 4), Names())
    schedule = session.engine.in_force
    assert schedule.profile.calls_beside
    placement = schedule.plan.placement
    alone = replace(schedule.profile, calls_beside=False)
    placed = Kinds(alone).placed(placement)
    given = placement, schedule.plan.pools, 0, False, (2,) * len(placement.units), placed
    ours, without = peaks(schedule.profile, *given), peaks(alone, *given)
    largest = max(unit.weight_bytes for unit in alone.units)
    assert ours.device - without.device == largest
    assert ours.host - without.host == (largest if weights == "disk" else 0)
    close(model)


@cache
def kept_outside(length: int) -> torch.Tensor:
    return torch.arange(float(length))[:, None]


class Tables(nn.Module):
    """A block that makes a table of positions when it first needs one, and keeps it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.how = how
        self.table: torch.Tensor | None = None
        self.tables: dict[int, torch.Tensor] = {}
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        length = rows.shape[1]
        if self.how == "attribute" and self.table is None:
            self.table = kept_outside.__wrapped__(length)
        if self.how == "buffer" and "made" not in dict(self.named_buffers()):
            self.register_buffer("made", kept_outside.__wrapped__(length), persistent=False)
        if self.how == "dict" and length not in self.tables:
            self.tables[length] = kept_outside.__wrapped__(length)
        found = {"attribute": self.table, "dict": self.tables.get(length)}.get(self.how)
        found = self.made if self.how == "buffer" else found
        return rows * self.weight * (kept_outside(length) if found is None else found)


class Positions(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tables(how) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows) + rows
        return rows.square().mean()


@pytest.mark.parametrize("how", ("attribute", "dict", "buffer"))
def test_what_modules_make_and_keep_is_made_by_a_real_forward_not_by_the_one_that_is_planned_with(how: str) -> None:
    plain, rows = Positions(how), torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = plain(rows).item()
    model, optimizer = spillway.prepare(Positions(how), spillway.AdamW(lr=1e-3), device="cpu", micro_batch=2)
    loss = model(rows)
    assert type(loss) is torch.Tensor and loss.item() == pytest.approx(expected, rel=1e-6)
    assert model.blocks[0].calls == 2  # micro-batches
    loss.backward()
    optimizer.step()
    close(model)


def test_what_is_kept_elsewhere_is_refused_and_may_be_made_before() -> None:
    rows = torch.randn(4, 5, 8)
    model, _ = spillway.prepare(Positions("outside"), spillway.AdamW(lr=1e-3), device="cpu")
    with pytest.raises(spillway.UsageError, match=r"make it in __init__, or by a forward before prepare"):
        model(rows)
    close(model)
    kept_outside.cache_clear()
    again = Positions("outside")
    expected = again(rows).item()
    model, _ = spillway.prepare(again, spillway.AdamW(lr=1e-3), device="cpu")
    assert model(rows).item() == pytest.approx(expected, rel=1e-6)
    close(model)


class Looking(nn.Module):
    """Its blocks may look at a value, so that no forward on shapes alone tells what they call."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.looks = looks
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.blocks[0].requires_grad_(False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            if self.looks and x.detach().sum().item() > 1e9:
                x = x * 0
        return self.norm(x).square().mean()


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_a_forward_on_real_data_tells_of_activations_what_one_on_shapes_does(activations: str) -> None:
    rows, found = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), {}
    for looks in (False, True):
        model, optimizer = spillway.prepare(
            Looking(looks), spillway.SGD(lr=0.1, momentum=0.0), device="cpu", activations=activations
        )
        losses = []
        for _ in range(2):
            loss = model(rows)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule = prepared(model).session.schedules.of((rows,), {})
        found[looks] = losses, schedule.profile, schedule.plan.peaks.device
        close(model)
    assert found[True] == found[False]
    calls = found[True][1].calls
    assert all(call.work_bytes and call.saved_bytes for call in calls[1:]) and any(call.act_bytes for call in calls)


class Routed(nn.Module):
    """A block that also gives what it found in all rows together: a count, or a loss of its own."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.linear, self.gives = nn.Linear(8, 8), gives

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x).tanh()
        if self.gives == "counts":
            with torch.no_grad():
                return y, (y.argmax(-1, keepdim=True) == torch.arange(8)).sum(0)
        return y, y.mean(0)[:1].square()


class Mixed(nn.Module):
    def __init__(self, gives: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Routed(gives), Routed(gives)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, first = self.blocks[0](x)
        x, second = self.blocks[1](x)
        return (x.sum(-1) * (first.sum() + second[0] + 1)).mean()


@pytest.mark.parametrize("gives", ("counts", "a loss"))
def test_a_block_that_mixes_rows_in_one_of_its_outputs_is_not_cut_into_micro_batches(gives: str) -> None:
    plain, x = Mixed(gives), torch.linspace(-1, 1, 32).view(4, 8)
    model, _ = spillway.prepare(Mixed(gives), spillway.SGD(lr=0.1, momentum=0.0), device="cpu", micro_batch=2)
    for _ in range(2):
        torch.testing.assert_close(model(x).item(), plain(x).item())
    shapes = prepared(model).session.schedules.of((x,), {}).shapes
    assert all(shape.chunks == 1 for shape in shapes)
    spillway.close(model)


def test_the_number_of_items_in_a_batch_is_no_other_kind_of_batch() -> None:
    model, optimizer = spillway.prepare(models.llama(), spillway.SGD(lr=0.1, momentum=0.0), device="cpu")
    plain, seen = models.llama(), set()
    for count in (30, 31, 32):
        batch = models.batch("llama", 0)
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        optimizer.step()
        seen.add(id(prepared(model).session.engine.schedule))
        if count == 30:
            torch.testing.assert_close(loss.item(), plain(**batch, num_items_in_batch=count).loss.item())
    assert len(seen) == 1
    close(model)


@pytest.mark.parametrize(("pieces", "told"), [(2, "and micro_batch=4 "), (5, "and micro_batch=1 "), (9, "need less")])
def test_a_batch_that_does_not_fit_whole_is_told_which_micro_batch_does(pieces: int, told: str, tmp_path: Path) -> None:
    def planner(profile: ModelProfile, is_open: bool) -> Plan:
        if max(call.chunks for call in profile.calls) < pieces:
            raise spillway.PlanInfeasible("smaller batches need less", TierPeaks(0, 0, 0))
        return session.schedules.of((), models.batch("llama", 0)).plan

    model, _ = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    session = prepared(model).session
    batch = models.batch("llama", 0, rows=8)
    with pytest.raises(spillway.PlanInfeasible, match=told):
        schedules.Schedules(session.forwards, planner, None, lambda: False).of((), batch)
    close(model)


class TakesFour(TakesNames):
    """Whatever may be computed of other numbers of rows."""

    def forward(self, rows: torch.Tensor, names: Names) -> torch.Tensor:
        return super().forward(rows.view(4, 4), names)


def test_a_forward_of_a_fixed_number_of_rows_that_does_not_fit_is_told_so(tmp_path: Path) -> None:
    def planner(profile: ModelProfile, is_open: bool) -> Plan:
        raise spillway.PlanInfeasible("smaller batches need less", TierPeaks(0, 0, 0))

    model, _ = spillway.prepare(TakesFour(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    made = schedules.Schedules(prepared(model).session.forwards, planner, None, lambda: False)
    with pytest.raises(spillway.PlanInfeasible, match="need less$"):
        made.of((torch.ones(4, 4), Names()), {})
    close(model)
