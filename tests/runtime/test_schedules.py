"""A plan per shape of batch, made once, and not kept for ever."""

from pathlib import Path

import pytest

import models
import spillway
from spillway.api import close
from spillway.assembly import prepared
from spillway.runtime import schedules


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
