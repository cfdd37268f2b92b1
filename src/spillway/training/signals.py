"""Stopping when asked to, with nothing lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spillway.report.progress import Reporter


@dataclass(slots=True)
class Stop:
    """Set by the first Ctrl-C or SIGTERM."""

    asked: bool = False
    waits: bool = False  # for the step in flight; before the first one there is nothing to wait for


@contextmanager
def stop_on_signals(reporter: Reporter) -> Iterator[Stop]:
    """The first signal lets the step in flight finish, where there is one; the second one ends at once."""
    stop = Stop()

    def note(number: int, frame: object) -> None:
        if stop.asked or not stop.waits:
            raise KeyboardInterrupt
        stop.asked = True
        reporter.say("stopping after the step in flight; once more to stop at once")

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]  # not under nohup
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
