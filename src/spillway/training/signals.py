"""Stopping when asked to, with nothing lost."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from spillway.spec.defaults import nothing


@dataclass(slots=True)
class Stop:
    """Set by the first Ctrl-C or SIGTERM."""

    asked: bool = False
    waits: bool = False  # for the step in flight; before the first one there is nothing to wait for


_TOLD = b"\nstopping after the step in flight; once more to stop at once\n"
_END = 0  # no signal has this number


@contextmanager
def stop_on_signals(at_once: Callable[[], None] | None = None) -> Iterator[Stop]:
    """The first signal lets the step in flight finish, where there is one; the second one does not wait for it.
    `at_once`: ends the process, from whatever thread; without it the second signal raises KeyboardInterrupt."""
    stop = Stop()
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]  # not under nohup

    def note(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            _leave(terminals)
        if not stop.waits or (stop.asked and at_once is None):
            raise KeyboardInterrupt
        stop.asked = True

    before = {number: signal.signal(number, note) for number in heard}
    try:
        with _listening(heard, stop, at_once or nothing):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listening(numbers: Collection[int], stop: Stop, at_once: Callable[[], None]) -> Iterator[None]:
    """Answers signals on a thread of its own: Python's handlers run in the main thread alone, which sits in `backward`
    for as long as that takes where a GPU computes."""
    hears, tells = os.pipe()
    os.set_blocking(tells, False)

    def listen() -> None:
        asked = False
        while (number := os.read(hears, 1)[0]) != _END:
            if number not in numbers or not stop.waits:
                continue
            if asked:
                at_once()
            asked = True
            with suppress(OSError):
                os.write(2, _TOLD)  # not by way of the reporter, which may be printing

    thread = threading.Thread(target=listen, name="spillway-signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(tells, bytes([_END]))
        thread.join()
        os.close(tells)
        os.close(hears)


def _leave(terminals: list[int]) -> None:
    """The terminal is gone, and whatever is printed there from now on would fail: in the middle of a save, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in terminals:
        os.dup2(nowhere, fd)
    os.close(nowhere)
