"""Clipping in every mode, loss scaling, steps that are skipped, and accumulation without a fixed number."""

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters, save_point
from spillway.assembly import prepared
from spillway.optim.clip import Clipping
from spillway.spec.errors import SkippedStep
from spillway.spec.plan import UPDATE_MODES

LR = 1e-3
PLACES = ("disk", "host", "device")


def prepare(
    model: nn.Module,
    store: Path,
    update: str,
    place: str,
    accumulation: int = 1,
    resume: bool = False,
    **settings: object,
) -> tuple[nn.Module, spillway.optim.optimizer.StreamingOptimizer]:
    return spillway.prepare(
        model,
        spillway.AdamW(lr=LR, eps=reference.EPS, **settings),  # type: ignore[arg-type]
        store=store,
        device="cpu",
        update=update,
        weights=place,
        states=place,
        gradient_accumulation_steps=accumulation,
        resume=resume,
    )


def unit_norms(model: nn.Module, units: list[list[str]]) -> None:
    """Clip each unit's gradients by their own norm."""
    params = dict(model.named_parameters())
    for names in units:
        torch.nn.utils.clip_grad_norm_([params[name] for name in names], 0.05)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("clip_by", ("unit", "value"))
@pytest.mark.parametrize(("update", "place"), list(itertools.product(UPDATE_MODES, PLACES))[::2])
def test_clipping_by_unit_and_by_value_is_that_of_torch(clip_by: str, update: str, place: str, tmp_path: Path) -> None:
    plain = models.llama()
    limit = 0.05 if clip_by == "unit" else 1e-3
    model, optimizer = prepare(copy.deepcopy(plain), tmp_path, update, place, max_grad_norm=limit, clip_by=clip_by)
    units = [[one.name for one in unit.layout.places] for unit in prepared(model).session.units]
    theirs = torch.optim.AdamW(reference.groups(plain, 0.01), lr=LR, eps=reference.EPS, fused=True)
    for number in range(4):
        batch = models.batch("llama", number)
        model(**batch).loss.backward()
        optimizer.step()
        plain(**batch).loss.backward()
        if clip_by == "unit":
            unit_norms(plain, units)
        else:
            torch.nn.utils.clip_grad_value_(plain.parameters(), limit)
        theirs.step()
        theirs.zero_grad()
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    close(model)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("update", "place"), list(itertools.product(UPDATE_MODES, PLACES)))
def test_float16_under_a_dynamic_loss_scale_skips_what_grad_scaler_skips(
    update: str, place: str, tmp_path: Path
) -> None:
    factors = [1.0, 1e4, 1.0, 1.0, 3e3, 1e5, 1.0, 1.0]
    plain = models.llama().half()
    model, optimizer = prepare(copy.deepcopy(plain), tmp_path, update, place)
    batches = [models.batch("llama", number) for number in range(len(factors))]
    losses, made = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SkippedStep)
        for batch, factor in zip(batches, factors, strict=True):
            loss = model(**batch).loss
            optimizer.scale(loss * factor).backward()
            optimizer.step()
            losses.append(loss.item())
            made.append(not optimizer.last_result.skipped)
    expected, expected_made = reference.train_fp16(plain, batches, LR, factors)
    assert made == expected_made and not all(made) and any(made)
    assert sum(entry.category is SkippedStep for entry in caught) == made.count(False) == optimizer.skipped_steps
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=2e-3, atol=2e-4, msg=name)
    close(model)


def test_a_resumed_float16_run_goes_on_with_its_loss_scale_and_its_masters(tmp_path: Path) -> None:
    def train(store: Path, stop: int | None) -> dict[str, torch.Tensor]:
        model, optimizer = prepare(models.llama().half(), store, "deferred", "disk")
        for number in range(6):
            loss = model(**models.batch("llama", number)).loss
            optimizer.scale(loss * (1e6 if number == 1 else 1.0)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SkippedStep)
                optimizer.step()
            if number == stop:
                scale = optimizer.loss_scale.value
                save_point(model)
                close(model)
                model, optimizer = prepare(models.llama().half(), store, "overlap", "disk", resume=True)
                model(**models.batch("llama", number))  # opens the store
                assert optimizer.loss_scale.value == scale < 2.0**16
        weights = read_parameters(model)
        close(model)
        return weights

    whole, resumed = train(tmp_path / "whole", None), train(tmp_path / "resumed", 3)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_loss_that_should_have_been_scaled_and_was_not_is_refused(tmp_path: Path) -> None:
    model, optimizer = prepare(models.llama().half(), tmp_path, "deferred", "disk")
    model(**models.batch("llama", 0)).loss.backward()
    with pytest.raises(spillway.UsageError, match=r"optimizer.scale\(loss\)"):
        optimizer.step()
    close(model)


def test_an_overflow_at_the_smallest_loss_scale_is_an_error(tmp_path: Path) -> None:
    model, optimizer = prepare(models.llama().half(), tmp_path, "deferred", "disk", loss_scale=1.0)
    loss = model(**models.batch("llama", 0)).loss
    optimizer.scale(loss * float("inf")).backward()
    with pytest.raises(spillway.NonFinite, match="infinite or not a number"):
        optimizer.step()
    close(model)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("update", "place"), list(itertools.product(UPDATE_MODES, PLACES)))
def test_a_step_that_may_be_skipped_leaves_nothing_changed_where_nothing_is_clipped(
    update: str, place: str, tmp_path: Path
) -> None:
    model, optimizer = prepare(models.llama(), tmp_path, update, place, max_grad_norm=None, may_skip=True)
    for number in range(5):
        model(**models.batch("llama", number)).loss.backward()
        optimizer.step()
    before = read_parameters(model)
    loss = model(**models.batch("llama", 9)).loss
    with pytest.raises(spillway.NonFinite):
        (loss * float("nan")).backward()
        optimizer.step()
    after = read_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model(**models.batch("llama", 9)).loss.backward()
    optimizer.step()
    assert any(not torch.equal(before[name], now) for name, now in read_parameters(model).items())
    close(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("update", ("serial", "overlap", "deferred"))
@pytest.mark.parametrize("place", PLACES)
def test_no_sync_adds_up_as_many_backwards_as_one_likes(update: str, place: str, tmp_path: Path) -> None:
    plain = models.llama()
    model, optimizer = prepare(copy.deepcopy(plain), tmp_path, update, place, accumulation=2)
    numbers, parts = itertools.count(), []
    for count in (3, 1, 4):
        batches = [models.batch("llama", next(numbers)) for _ in range(count)]
        parts.append(batches)
        for batch in batches[:-1]:
            with spillway.no_sync(model):
                (model(**batch).loss / count).backward()
        (model(**batches[-1]).loss / count).backward()
        optimizer.step()
    reference.train(plain, parts, LR, 1.0)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    close(model)


def test_no_sync_asks_for_a_plan_that_accumulates(tmp_path: Path) -> None:
    model, _ = prepare(models.llama(), tmp_path, "serial", "host")
    with spillway.no_sync(model), pytest.raises(spillway.UsageError, match="gradient_accumulation_steps"):
        model(**models.batch("llama", 0))
    close(model)


@pytest.mark.parametrize("which", ("optimizer", "model"))
def test_zero_grad_drops_what_an_unfinished_step_has_summed(which: str, tmp_path: Path) -> None:
    plain = models.llama()
    model, optimizer = prepare(copy.deepcopy(plain), tmp_path, "overlap", "host", accumulation=2, max_grad_norm=None)
    steps = []
    zero = optimizer.zero_grad if which == "optimizer" else model.zero_grad
    for number in range(3):
        zero()  # as many loops begin
        model(**models.batch("llama", 10 + number)).loss.backward()
        zero()
        kept = [models.batch("llama", 2 * number), models.batch("llama", 2 * number + 1)]
        for batch in kept:
            (model(**batch).loss / 2).backward()
        with pytest.raises(spillway.UsageError, match="call it after the step"):
            zero()
        optimizer.step()
        zero()
        steps.append(kept)
    reference.train(plain, steps, LR, None)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    model(**models.batch("llama", 0)).loss.backward()
    loss = model(**models.batch("llama", 1)).loss
    with pytest.raises(spillway.UsageError, match="call it before the forward"):
        zero()
    loss.backward()
    optimizer.step()
    close(model)


def test_elements_are_clamped_also_where_the_scaled_limit_is_no_float16() -> None:
    grad = torch.tensor([-65504.0, 1.0, 65504.0], dtype=torch.float16)
    Clipping("value", 0.5).clamp(grad, 2.0**16)
    assert grad.tolist() == [-32768.0, 1.0, 32768.0]
    Clipping("value", 1.0).clamp(grad, 2.0**16)
    assert grad.tolist() == [-32768.0, 1.0, 32768.0]


class Explodes(torch.autograd.Function):
    """Gradients become infinite where it is told so."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf") if Explodes.now else grad


def test_what_is_evaluated_after_a_step_that_was_dropped_is_the_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where later units were updated on a guess before an earlier one's gradient was found to be infinite."""
    plain = models.llama()
    first = plain.model.layers[0]
    forward = first.forward
    first.forward = lambda *args, **kwargs: Explodes.apply(forward(*args, **kwargs))
    model, optimizer = spillway.prepare(
        plain, spillway.AdamW(lr=LR, max_grad_norm=1e6), store=tmp_path, device="cpu", update="overlap",
        states="disk", weights="host",
    )  # fmt: skip

    def looked_at() -> list[float]:
        with torch.no_grad():
            alone = model.model.norm(torch.ones(1, 1, 64)).sum()
            whole = model(**models.batch("llama", 99)).loss
            return [alone.item(), whole.item()]

    for number in range(6):
        model(**models.batch("llama", number)).loss.backward()
        optimizer.step()
    before = looked_at()
    monkeypatch.setattr(Explodes, "now", True)
    model(**models.batch("llama", 6)).loss.backward()
    with pytest.raises(spillway.NonFinite):
        optimizer.step()
    monkeypatch.undo()
    assert looked_at() == before
    close(model)
