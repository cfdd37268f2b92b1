"""Watches how much host memory this process really takes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spillway.hardware.limits import process_bytes


class MemoryWatch:
    """Samples the process's memory on a thread of its own; `peaks` has the largest seen in each phase of a run, in
    bytes."""

    def __init__(self, phase: str, every_s: float = 0.02) -> None:
        """`phase`: what the process is in when it begins to watch."""
        self.peaks: dict[str, int] = {}
        self._phase = phase
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spillway-memory", daemon=True)
        self._look()

    @property
    def peak(self) -> int:
        """Of all phases."""
        return max(self.peaks.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is taken within is of this phase."""
        self._look()
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._look()
            self._phase = before

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        phase = self._phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), process_bytes())
