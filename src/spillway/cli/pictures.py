"""Files for pictures that options name."""

import os
from pathlib import Path

from spillway.spec.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path, suffixes: tuple[str, ...]) -> None:
    """Whether it can be written, before anything is computed for it. Raises UsageError."""
    if path.suffix not in suffixes:
        raise UsageError(f"--chart {path} must end in {', '.join(suffixes)}")
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--chart {path} cannot be written: {path.parent} is no directory that can be written to")
