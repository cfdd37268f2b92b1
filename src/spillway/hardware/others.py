"""How much of the processor others use meanwhile."""

import os
import time

import psutil

# Of the cores: more than this, and what was measured says little of the machine when it is left alone.
_MUCH = 0.1


class Others:
    """Watches from when it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    @property
    def share(self) -> float:
        """Of all cores' time since then: what other processes, and other guests of the same host, have taken."""
        passed = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        theirs = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return min(max(theirs / passed, 0.0), 1.0) if passed > 0 else 0.0

    @property
    def disturb(self) -> bool:
        """Whether that is much."""
        return self.share > _MUCH


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
