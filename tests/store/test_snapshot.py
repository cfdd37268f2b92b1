"""What a saved point waits for."""

import threading
from typing import cast

import torch

from spillway.store.disk import StripedDisk
from spillway.store.snapshot import Snapshot


class FakeDisk:
    def __init__(self, done: list[str]) -> None:
        self._done = done

    def sync(self) -> None:
        self._done.append("synced")


class SlowSnapshot(Snapshot):
    """Its thread starts when a unit that is about to change is already being written."""

    def __init__(self, done: list[str]) -> None:
        self.done, self.is_writing, self.may_go_on = done, threading.Event(), threading.Event()
        super().__init__([], {0: 0}, cast(StripedDisk, FakeDisk(done)), torch.empty(0), lambda count: None)

    def _run(self) -> None:
        self.is_writing.wait()
        super()._run()

    def _write(self, index: int, staging: torch.Tensor | None) -> None:
        if staging is None:
            self.is_writing.set()
            self.may_go_on.wait()
            self.done.append("written")


def test_what_a_changing_unit_has_begun_to_write_is_written_before_it_is_durable() -> None:
    done: list[str] = []
    snapshot = SlowSnapshot(done)
    changing = threading.Thread(target=snapshot.before_change, args=(0,))
    changing.start()
    snapshot.is_writing.wait()
    threading.Timer(0.2, snapshot.may_go_on.set).start()
    snapshot.wait()
    changing.join()
    assert done == ["written", "synced"]
