"""Watches how much host memory this process really takes."""

import threading

from spillway.hardware.limits import process_bytes


class MemoryWatch:
    """Samples the process's memory on a thread of its own; `peak` is the largest seen."""

    def __init__(self, every_s: float = 0.02) -> None:
        self.peak = process_bytes()
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spillway-memory", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, process_bytes())

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak = max(self.peak, process_bytes())
