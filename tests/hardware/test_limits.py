"""Memory in a container."""

from pathlib import Path

from spillway.hardware.limits import _left

GIB = 1 << 30


def test_files_that_the_kernel_can_drop_do_not_count_as_used(tmp_path: Path) -> None:
    limit, usage, stat = (tmp_path / name for name in ("limit", "usage", "memory.stat"))
    limit.write_text(f"{64 * GIB}\n")
    usage.write_text(f"{62 * GIB}\n")
    assert _left(limit, usage, stat) == 2 * GIB
    stat.write_text(f"anon {2 * GIB}\ninactive_file {59 * GIB}\nactive_file {GIB}\n")
    assert _left(limit, usage, stat) == 61 * GIB
    stat.write_text(f"inactive_file 0\ntotal_inactive_file {59 * GIB}\n")
    assert _left(limit, usage, stat) == 61 * GIB
    limit.write_text("max\n")
    assert _left(limit, usage, stat) >= 1 << 60
