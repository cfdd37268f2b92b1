"""Hundreds of steps under random plans while reads and writes are delayed and overtake each other."""

import faulthandler
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import models
import spillway
from spillway.api import close
from spillway.spec.plan import ACTIVATIONS, UPDATE_MODES
from spillway.store.disk import StripedDisk

STEPS = 50
MAX_GROWTH_BYTES = 32 << 20


@pytest.fixture
def watchdog() -> Iterator[None]:
    """A run that stands still ends, and says where."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def losses(store: Path, **options: Any) -> list[float]:
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=1e-3, max_grad_norm=1.0), store=store, device="cpu", **options
    )
    process, found, early = psutil.Process(), [], 0
    for number in range(STEPS):
        loss = model(**models.batch("llama", number)).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if number == 5:
            early = process.memory_info().rss
    growth = process.memory_info().rss - early
    close(model)
    assert growth < MAX_GROWTH_BYTES, f"{growth} bytes more than after the first steps"
    return found


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_random_plans_with_a_restless_drive_change_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watchdog: None
) -> None:
    dice = random.Random(seed)
    micro_batch = dice.choice([None, 1, 2])
    expected = losses(tmp_path / "quiet", update="serial", activations="recompute", micro_batch=micro_batch)
    for name in ("read", "read_all", "write_all"):
        true = getattr(StripedDisk, name)

        def slowly(self: StripedDisk, *args: Any, true: Any = true) -> Any:
            time.sleep(dice.choice([0, 0, 0.001, 0.003]))
            return true(self, *args)

        monkeypatch.setattr(StripedDisk, name, slowly)
    found = losses(
        tmp_path / "restless",
        update=dice.choice(["auto", *UPDATE_MODES]),
        activations=dice.choice(ACTIVATIONS),
        weights=dice.choice(["disk", "host", "auto"]),
        states="disk",
        micro_batch=micro_batch,
    )
    assert found == expected
