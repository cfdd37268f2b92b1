"""The plan of one model on this machine."""

from pathlib import Path

import pytest
import torch

import models
import spillway
from spillway import planner
from spillway.api import close, read_parameters
from spillway.assembly import prepared


def test_the_device_is_measured_with_calls_whatever_is_planned_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without calls, as where weights are looked at first, nobody knows how wide they are."""
    asked: list[tuple[int, int]] = []
    measure = planner.measure

    def noted(device: torch.device, dtype: torch.dtype, paths: tuple[Path, ...], rows: int, hidden: int, *more):  # type: ignore[no-untyped-def]
        asked.append((rows, hidden))
        return measure(device, dtype, paths, rows, hidden, *more)

    monkeypatch.setattr(planner, "measure", noted)
    model, _ = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    read_parameters(model)
    assert asked == [(0, 0)]
    before = prepared(model).planner.hardware
    for length in (64, 8):
        model(**models.batch("llama", 0, rows=1, length=length)).loss.backward()
        prepared(model).session.settle()
        prepared(model).session.rounds.start_anew()
    assert [rows for rows, _ in asked] == [0, 64] and asked[1][1] > 0
    assert prepared(model).planner.hardware != before
    close(model)
