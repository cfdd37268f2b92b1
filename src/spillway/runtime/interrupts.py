"""What Ctrl-C must not tear apart."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_TELL_AFTER = b"\nfinishing the update that is under way; once more to stop at once, which may lose it\n"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C within is raised at the end, a second one at once. Only where Python's own handler is in force: others
    have their own ways."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(frame)
        with suppress(OSError):
            os.write(2, _TELL_AFTER)  # print may be under way itself

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
