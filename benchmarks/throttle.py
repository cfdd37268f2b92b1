"""A drive made slower for child processes, through cgroup v1, so that disk-bound cases repeat."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")


@contextmanager
def throttled(directory: Path, bytes_per_s: int) -> Iterator[Callable[[], None] | None]:
    """What a child calls first (`preexec_fn`) to read and write the drive under `directory` no faster, each way; with 0
    as fast as it goes. None where there is no such control (it takes root, and a whole drive)."""
    with throttled_each({directory: bytes_per_s} if bytes_per_s else {}) as enter:
        yield enter


@contextmanager
def throttled_each(rates: dict[Path, int]) -> Iterator[Callable[[], None] | None]:
    """As `throttled`, of several drives by the directories on them. What children measure meanwhile is not kept: it is
    not the drives' own speed, and what was kept of that is not this one."""
    if not rates:
        yield lambda: None
        return
    group = BLKIO / f"spillway-{os.getpid()}"
    try:
        group.mkdir()
        for directory, bytes_per_s in rates.items():
            device = os.stat(directory).st_dev
            for way in ("read", "write"):
                file = group / f"blkio.throttle.{way}_bps_device"
                file.write_text(f"{os.major(device)}:{os.minor(device)} {bytes_per_s}")
    except OSError:
        if group.exists():
            group.rmdir()
        yield None
        return

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    before = os.environ.get("XDG_CACHE_HOME")
    try:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            yield enter
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
        group.rmdir()
