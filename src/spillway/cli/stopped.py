"""The end of a command that is not waited for."""

import json
import os
from contextlib import suppress

STOPPED = "stopped; the same command goes on from the last saved point, if there is one"
CODE = 130


def end_at_once(as_json: bool) -> None:
    """End the process where it is. An exception in the middle of an operator's work would take it down with SIGABRT as
    often as not, and what is saved is as safe as from SIGKILL."""
    with suppress(OSError):
        if as_json:
            os.write(1, json.dumps({"error": STOPPED, "exit_code": CODE}).encode() + b"\n")
        show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # which a bar has hidden
        os.write(2, show_cursor + f"\nspillway: {STOPPED}\n".encode())
    os._exit(CODE)
