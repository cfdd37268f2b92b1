"""What others take of the processor is told from what this process does."""

import os
import time
from types import SimpleNamespace

import psutil
import pytest

from spillway.hardware.others import Others


@pytest.mark.parametrize(("busy", "own", "share"), [(10.0, 10.0, 0.0), (10.0, 2.0, 0.2), (60.0, 0.0, 1.0)])
def test_what_this_process_uses_is_not_of_others(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, share: float
) -> None:
    now = {"clock": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: now["clock"])
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=now["busy"], nice=0, system=0, steal=0))
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=now["own"], system=0))
    others = Others()
    now.update(clock=10.0, busy=busy, own=own)
    assert others.share == pytest.approx(share)
    assert others.disturb == (share > 0.1)


def test_a_process_beside_this_one_is_seen() -> None:
    others = Others()
    child = os.posix_spawn("/bin/sh", ["sh", "-c", "i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done"], {})
    os.waitpid(child, 0)
    assert others.share > 0.1 / (os.cpu_count() or 1)
