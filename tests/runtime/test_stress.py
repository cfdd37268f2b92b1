"""Hundreds of steps under random plans on a drive that delays transfers and ends them in another order."""

import faulthandler
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ahead
import models
import spillway
from spillway.api import close
from spillway.native import Batch, DiskEngine, Transfer, batch_of, transfers_of
from spillway.spec.plan import ACTIVATIONS, UPDATE_MODES
from spillway.spec.sizes import PAGE

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


class RestlessDrive:
    """Transfers end late, and in any order: those of a batch in pieces, and reads before writes that began sooner."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._run = DiskEngine.run

    def run(self, engine: DiskEngine, batch: Batch, is_write: bool) -> None:
        pieces = [piece for transfer in transfers_of(batch) for piece in self._cut(transfer)]
        self._dice.shuffle(pieces)
        middle = self._dice.randrange(len(pieces) + 1)
        for part in filter(None, (pieces[:middle], pieces[middle:])):
            time.sleep(self._dice.choice([0, 0, 0.001, 0.003]))
            self._run(engine, batch_of(part), is_write)

    def _cut(self, transfer: Transfer) -> Iterator[Transfer]:
        pages = transfer.num_bytes // PAGE
        each = max(pages // self._dice.choice([1, 2, 5]), 1) * PAGE
        for start in range(0, transfer.num_bytes, each):
            size = min(each, transfer.num_bytes - start)
            yield Transfer(transfer.fd, transfer.address + start, transfer.offset + start, size)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_random_plans_with_a_restless_drive_change_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watchdog: None
) -> None:
    dice = random.Random(seed)
    micro_batch = dice.choice([None, 1, 2])
    expected = losses(tmp_path / "quiet", update="serial", activations="recompute", micro_batch=micro_batch)
    drive = RestlessDrive(dice)
    if dice.random() < 0.5:
        ahead.read_ahead_always(monkeypatch)
    monkeypatch.setattr(DiskEngine, "run", lambda engine, transfers, is_write: drive.run(engine, transfers, is_write))
    found = losses(
        tmp_path / "restless",
        update=dice.choice(["auto", *UPDATE_MODES]),
        activations=dice.choice(ACTIVATIONS),
        weights=dice.choice(["disk", "host", "auto"]),
        states="disk",
        micro_batch=micro_batch,
    )
    assert found == expected
