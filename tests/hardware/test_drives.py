import os
from pathlib import Path

from spillway.hardware.drives import endurance_of


def block_device(sysfs: Path, path: Path, model: str, num_bytes: int) -> None:
    """A drive with one partition, which the path lies on, as the kernel shows it."""
    number = path.stat().st_dev
    partition = sysfs / "disk" / "part1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (sysfs / "disk" / "device").mkdir()
    (sysfs / "disk" / "device" / "model").write_text(model + "\n")
    (sysfs / "disk" / "size").write_text(f"{num_bytes // 512}\n")
    (sysfs / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)


def test_a_known_drive_is_recognised_and_its_endurance_is_that_of_its_size(tmp_path: Path) -> None:
    block_device(tmp_path, tmp_path, "Samsung SSD 990 PRO 4TB", 4 * 10**12)
    assert endurance_of(tmp_path, tmp_path) == 2400 * 10**12


def test_an_unknown_drive_has_no_known_endurance(tmp_path: Path) -> None:
    block_device(tmp_path, tmp_path, "QEMU HARDDISK", 10**12)
    assert endurance_of(tmp_path, tmp_path) == 0.0


def test_what_is_no_drive_has_none_either(tmp_path: Path) -> None:
    assert endurance_of(tmp_path, tmp_path / "nowhere") == 0.0
