"""Stopping when asked to, with nothing lost."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(slots=True)
class Stop:
    """Set by the first Ctrl-C or SIGTERM."""

    asked: bool = False
    waits: bool = False  # for the step in flight; before the first one there is nothing to wait for


_TOLD = b"\nstopping after the step in flight; once more to stop at once\n"


def raise_interrupt() -> None:
    """Wherever the interpreter is."""
    raise KeyboardInterrupt


@contextmanager
def stop_on_signals(at_once: Callable[[], None] = raise_interrupt) -> Iterator[Stop]:
    """The first signal lets the step in flight finish, where there is one; at the second one `at_once` ends it."""
    stop = Stop()
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def note(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            _leave(terminals)
        if not stop.waits:
            raise KeyboardInterrupt
        if stop.asked:
            at_once()
        stop.asked = True
        with suppress(OSError):
            os.write(2, _TOLD)  # not by way of the reporter, which may be printing

    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]  # not under nohup
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(terminals: list[int]) -> None:
    """The terminal is gone, and whatever is printed there from now on would fail: in the middle of a save, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in terminals:
        os.dup2(nowhere, fd)
    os.close(nowhere)
