"""How much memory this process may use, honouring cgroup limits."""

import ctypes
import mmap
from pathlib import Path

import psutil

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_UNLIMITED = 1 << 60
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def free_host_bytes() -> int:
    """Host memory this process can still take: what the system has available, or what its cgroup leaves."""
    return min([psutil.virtual_memory().available, *(_left(*files) for files in _cgroup_files())])


def process_bytes() -> int:
    """Host memory of this process that cannot be dropped: anonymous pages, not mapped files."""
    resident, files = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(files)) * mmap.PAGESIZE


def trim_heap() -> None:
    """Give back what was freed between blocks in use and the C library still holds, as far as it can (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _cgroup_files() -> list[tuple[Path, Path, Path]]:
    """Limit and usage files of every cgroup this process is in, up to the root: v2, then v1; and what tells how much of
    the usage is files that can be dropped."""
    files = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            root, limit, usage = _V2, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = _V1, "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        at = root / group.lstrip("/")
        for folder in (at, *at.parents):
            if (folder / limit).exists():
                files.append((folder / limit, folder / usage, folder / "memory.stat"))
            if folder == root:
                break
    return files


def _left(limit: Path, usage: Path, stat: Path) -> int:
    try:
        text = limit.read_text().strip()
        allowed = _UNLIMITED if text == "max" else int(text)
        if allowed >= _UNLIMITED:
            return _UNLIMITED
        return max(allowed - int(usage.read_text()) + _droppable(stat), 0)
    except (OSError, ValueError):
        return _UNLIMITED


def _droppable(stat: Path) -> int:
    """Of the page cache, which counts as used, what the kernel gives back first."""
    try:
        found = dict(line.split() for line in stat.read_text().splitlines())
        return int(found.get("total_inactive_file", found.get("inactive_file", 0)))  # with children's; v2 has only that
    except (OSError, ValueError):
        return 0
