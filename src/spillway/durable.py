"""Files that are there whole or not at all, whenever the process is killed or the power fails."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put a file in the place of another, if there is one; durable when it returns. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make durable which files are in it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
