"""Steps made in place, where the drives have no room for two copies."""

import copy
import itertools
from pathlib import Path

import pytest
import torch

import models
import reference
import spillway
from spillway.api import close, read_parameters, save_point
from spillway.assembly import prepared
from spillway.spec.plan import IN_PLACE, UPDATE_MODES, KeepPoints

LR = 1e-3


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("update", "weights"), list(itertools.product(UPDATE_MODES, ("disk", "host", "device"))))
def test_they_equal_plain_pytorch(update: str, weights: str, tmp_path: Path) -> None:
    plain = models.llama()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=LR, eps=reference.EPS),
        store=tmp_path,
        device="cpu",
        update=update,
        weights=weights,
        states="disk",
        keep=IN_PLACE,
    )
    batches = [[models.batch("llama", number)] for number in range(6)]
    for (batch,) in batches:
        model(**batch).loss.backward()
        optimizer.step()
    reference.train(plain, batches, LR, 1.0)
    found = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    session = prepared(model).session
    assert all(len(home.extents) == 1 for home in session.store.homes.units)
    assert not list(tmp_path.glob("step-*.json"))
    close(model)


def test_a_step_that_is_not_finite_leaves_them_as_they_are(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=LR), store=tmp_path, device="cpu", weights="disk", states="disk",
        update="overlap", keep=IN_PLACE,
    )  # fmt: skip
    for number in range(5):
        model(**models.batch("llama", number)).loss.backward()
        optimizer.step()
    before = read_parameters(model)
    with pytest.raises(spillway.NonFinite):
        (model(**models.batch("llama", 9)).loss * float("inf")).backward()
        optimizer.step()
    after = read_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    close(model)


def test_where_memory_has_no_place_on_disk_there_is_no_point_to_save_and_none_to_resume(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=LR), store=tmp_path, device="cpu", states="host", keep=KeepPoints(0, False)
    )
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    with pytest.raises(spillway.UsageError, match="this run saves no points"):
        save_point(model)
    close(model)
    again, _ = spillway.prepare(models.llama(), store=tmp_path, device="cpu", resume=True)
    again(**models.batch("llama", 0))
    assert prepared(again).points.step == 0
    close(again)
