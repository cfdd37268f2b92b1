"""Writes what rests in memory to a saved point while training goes on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from spillway.native import DiskEngine
from spillway.spec.errors import invariant
from spillway.spec.sizes import PAGE
from spillway.store.disk import Extent, StripedDisk
from spillway.store.homes import UnitHome
from spillway.store.layout import Component

# Few requests in flight: the lanes' own go first.
_DEPTH = 8


class Snapshot:
    """The state of a step, unit by unit, on a thread of its own. A unit that is about to change is written first:
    `before_change` returns when it is. So all of it is written, at the latest, by the end of the next step."""

    def __init__(
        self,
        homes: list[UnitHome],
        places: dict[int, int],
        disk: StripedDisk,
        staging: torch.Tensor,
        progress: Callable[[int], None],
    ) -> None:
        """`places`: the extent that each unit goes to, in the order in which they will change. `staging`: host memory
        that what does not lie in whole pages of it passes through, before this returns. `progress` is called with bytes
        written, from any thread."""
        self._homes = homes
        self._places = places
        self._disk = disk
        self._progress = progress
        self._engine = DiskEngine(_DEPTH)
        self._lock = threading.Lock()
        self._left = dict.fromkeys(places)
        self._error: BaseException | None = None
        self._stopped = False
        try:
            for index in places:
                self._write(index, staging)
        except BaseException:
            self._engine.close()
            raise
        self._thread = threading.Thread(target=self._run, name="spillway-snapshot", daemon=True)
        self._thread.start()

    def before_change(self, index: int) -> None:
        """Return when the unit's state of that step is written (or could not be: `wait` says so)."""
        with self._lock:
            self._write_left(index)

    def wait(self) -> None:
        """Return when everything is written and durable. Raises DiskError where it could not be."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give it up: return when nothing is being written any more, also where the user does not want to wait."""
        self._stopped = True
        while self._thread.is_alive():
            with suppress(KeyboardInterrupt):
                self._thread.join()

    def _run(self) -> None:
        for index in self._places:
            with self._lock:  # also for those that are no longer left: one may just be being written
                self._write_left(index)
        try:
            self._disk.sync()
        except BaseException as error:
            self._error = self._error or error
        self._engine.close()

    def _write_left(self, index: int) -> None:
        if index not in self._left or self._error is not None or self._stopped:
            return
        del self._left[index]
        try:
            self._write(index, None)
        except BaseException as error:
            self._error = error

    def _write(self, index: int, staging: torch.Tensor | None) -> None:
        """The arrays that lie in whole pages of host memory, or, with `staging`, the others."""
        home = self._homes[index]
        for part, resting, end in _resting(home):
            in_pages = resting.device.type == "cpu" and resting.data_ptr() % PAGE == 0
            if in_pages == (staging is not None):
                continue
            step = end if staging is None else staging.numel() // PAGE * PAGE
            for start in range(0, end, step):
                size = min(step, end - start)
                piece = resting[start : start + size]
                content = piece if staging is None else staging[:size].copy_(piece)
                self._put(home, self._places[index], part.offset + start, content)

    def _put(self, home: UnitHome, extent: int, offset: int, content: torch.Tensor) -> None:
        invariant(extent < len(home.extents), "a saved point has no room")
        home.checks[extent].feed(offset, content)
        place = Extent(home.extents[extent].offset + offset, content.numel())
        self._disk.write_all(self._engine, [(place, content)])
        self._progress(content.numel())


def num_resting_bytes(homes: list[UnitHome]) -> int:
    """Bytes that a snapshot writes of all units whose states rest in memory."""
    resting = (home for home in homes if home.layout.num_trainable and home.where.states != "disk")
    return sum(end for home in resting for _, _, end in _resting(home))


def _resting(home: UnitHome) -> Iterator[tuple[Component, torch.Tensor, int]]:
    """What a unit has in memory, and how many bytes of it change."""
    for part in home.layout.components:
        resting = home.weight if part.name == "weight" else (home.state or {}).get(part.name)
        if resting is not None:
            # What is frozen is in every extent, and never changes.
            yield part, resting, home.layout.grad_bytes if part.name == "weight" else part.num_bytes
