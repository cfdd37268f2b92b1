"""What this machine lacks or does slowly, and what to do about it."""

import errno
import os
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from spillway import native
from spillway.hardware.limits import free_host_bytes
from spillway.hardware.present import has_slow_16_bits
from spillway.native import DiskEngine
from spillway.spec.answers import Finding
from spillway.spec.sizes import format_size
from spillway.store.disk import available, existing

_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD
_SMALL_MODEL = 100_000_000  # parameters
_SLOW_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "drvfs", "overlay"}


def examine(paths: tuple[Path, ...]) -> list[Finding]:
    """Look at everything that matters for speed. `paths`: store paths."""
    checks: list[Callable[[], Finding]] = [_python, _native, _io_engine, _processor, _memory, _locked_memory, _device]
    findings = [check() for check in checks]
    for path in paths:
        findings += [_file_system(path), _direct_io(path), _room(path)]
    return findings


def _python() -> Finding:
    text = f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    return Finding("versions", text, "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer")


def _native() -> Finding:
    problem = native.load_problem()
    if problem:
        return Finding("native library", problem, "install again with a C++20 compiler and CMake: pip install .")
    return Finding("native library", f"loaded, {native.kernel_name()} kernels")


def _io_engine() -> Finding:
    engine = DiskEngine()
    backend = engine.backend
    engine.close()
    if backend == "io_uring":
        return Finding("disk engine", "io_uring")
    return Finding(
        "disk engine",
        f"{backend}: io_uring is missing or forbidden",
        "on Linux 5.6+ allow it: sysctl kernel.io_uring_disabled=0, or the container's seccomp profile",
    )


def _processor() -> Finding:
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    name = native.kernel_name()
    slow = name in ("portable", "pytorch") and platform.machine() in ("x86_64", "AMD64")
    fix = "a processor with AVX2 updates several times faster" if slow else ""
    if not fix and has_slow_16_bits() and not torch.cuda.is_available():
        fix = "it computes bfloat16 and float16 many times slower than float32: --dtype float32"
    return Finding("processor", f"{cores} cores, {name}", fix)


def _memory() -> Finding:
    free, total = free_host_bytes(), psutil.virtual_memory().total
    fix = "close other programs: less than half of the memory is free" if free < total / 2 else ""
    return Finding("host memory", f"{format_size(free)} free of {format_size(total)}", fix)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding("memory that can be pinned", "no limit")
    low = soft < 1 << 30
    fix = "raise it: ulimit -l unlimited (in /etc/security/limits.conf for good)" if low else ""
    return Finding("memory that can be pinned", format_size(soft), fix)


def _device() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        fix = "check the driver: nvidia-smi" if built else "for a GPU install a CUDA build of PyTorch"
        return Finding("device", "no CUDA device: the CPU computes", fix)
    free, total = torch.cuda.mem_get_info()
    width = _link_width()
    fix = (
        "the card is in a slot, or behind a riser, with fewer lanes than it has"
        if width and width[0] < width[1]
        else ""
    )
    lanes = f", PCIe x{width[0]} of x{width[1]}" if width else ""
    name = torch.cuda.get_device_name()
    return Finding("device", f"{name}, {format_size(free)} free of {format_size(total)}{lanes}", fix)


def _link_width() -> tuple[int, int] | None:
    """Lanes in use and lanes the card has, of the first one of a maker of GPUs to compute with (others drive displays
    of servers)."""
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            is_display = (device / "class").read_text().startswith("0x03")
            if is_display and (device / "vendor").read_text().strip() in _VENDORS:
                now, most = ((device / f"{name}_link_width").read_text() for name in ("current", "max"))
                return int(now), int(most)
        except (OSError, ValueError):
            continue
    return None


def _file_system(path: Path) -> Finding:
    here = existing(path)
    mounts = [part for part in psutil.disk_partitions(all=True) if here.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    kind = mount.fstype if mount else "unknown"
    fix = ""
    if kind in ("tmpfs", "ramfs"):
        fix = "this is a RAM disk: choose a path on a drive"
    elif kind in _SLOW_FILE_SYSTEMS:
        fix = "it is not a local drive (network, container layer or Windows mount): choose a local NVMe path"
    elif mount is not None and mount.mountpoint == "/":
        fix = "this is the system drive: a drive of its own wears and waits less"
    there = "" if path.exists() else "; the directory is not there yet"
    return Finding(f"store {path}", f"{kind} on {mount.mountpoint if mount else '?'}{there}", fix)


def _direct_io(path: Path) -> Finding:
    file = existing(path) / f".spillway-doctor-{os.getpid()}"
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)
        os.close(handle)
        found, fix = "yes", ""
    except OSError as error:
        found, fix = f"no ({error.strerror})", "it cannot be written: choose another path"
        if error.errno == errno.EINVAL:
            fix = "the page cache is used and takes memory: use ext4 or xfs on a drive"
        if error.errno == errno.ENOTDIR:
            found, fix = "no", "it is a file: choose a directory"
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return Finding(f"store {path}: O_DIRECT", found, fix)


def _room(path: Path) -> Finding:
    free = available(path)
    params = free / 24
    fix = "make room, or choose another path" if params < _SMALL_MODEL else ""
    return Finding(f"store {path}: room", f"{format_size(free)}: exact AdamW for {params / 1e9:.1f}B parameters", fix)
