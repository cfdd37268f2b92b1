"""Files that are there whole or not at all, whenever the process is killed or the power fails."""

import os
from pathlib import Path

from spillway.spec.sizes import PAGE, align


def write_whole(path: Path, text: str) -> None:
    """Put a file in the place of another, if there is one; durable when it returns. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_number(path: Path, number: int) -> None:
    """A file with a number in it, in the place of another number: it is overwritten, which needs no room on the drive
    and cannot be done by halves, for it lies in one sector. Raises OSError."""
    text = f"{number:020d}\n"
    if not path.exists() or path.stat().st_size != len(text):
        write_whole(path, text)
        return
    with open(path, "r+b") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def write_into(spare: Path, path: Path, text: str) -> None:
    """As `write_whole`, in the room of a file that is of no more use, where there is one that is large enough: then no
    drive is too full for it. Spaces follow the text. Raises OSError."""
    reserve_spare(spare, len(text.encode()))
    with open(spare, "r+b") as file:
        file.write(text.encode().ljust(spare.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    os.replace(spare, path)
    sync_directory(path.parent)


def reserve_spare(spare: Path, num_bytes: int) -> None:
    """Take the room that `write_into` needs for so many bytes, and some more. Raises OSError."""
    has = spare.stat().st_size if spare.exists() else 0
    if has < num_bytes:
        with open(spare, "ab") as file:
            file.write(b" " * (align(num_bytes + num_bytes // 4, PAGE) - has))
            file.flush()
            os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make durable which files are in it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
