"""Machines put together from known parts."""

from pathlib import Path

import pytest

from spillway.hardware.catalogue import DRIVES, GPUS, SERVERS, find_machine
from spillway.spec.errors import UsageError
from spillway.spec.machine import stripe_shares


def test_parts_add_up() -> None:
    machine = find_machine("rtx4090+4x990pro+128GB")
    one = DRIVES["990pro"]
    assert machine.device_bytes == 24 << 30 and machine.host_bytes == 128 * 10**9
    assert machine.hardware.read_bytes_per_s == 4 * one.read_bytes_per_s
    assert machine.disk_bytes == 4 * one.capacity_bytes and machine.endurance_bytes == 4 * one.endurance_bytes
    slower, server = find_machine("rtx4090+990pro+pcie3"), find_machine("RTX4090 + 990pro + server")
    assert slower.hardware.upload_bytes_per_s < machine.hardware.upload_bytes_per_s
    assert server.hardware.update_params_per_s > machine.hardware.update_params_per_s


def test_every_part_has_a_source_and_every_server_exists() -> None:
    assert all(part.source for part in (*GPUS.values(), *DRIVES.values()))
    assert all(find_machine(name).hardware.device_flops_per_s > 1e13 for name in (*SERVERS, *GPUS))


@pytest.mark.parametrize(
    ("text", "words"),
    (
        ("rtx4091", "did you mean rtx4090"),
        ("rtx4090+99pro", "did you mean 990pro"),
        ("4x990pro", "names no GPU"),
        ("rtx4090+-64GB", "there is no"),
        ("rtx4090+rtx3090", "names more than one GPU"),
        ("2xrtx4090", "names more than one GPU"),
        ("rtx4090+0x990pro", "count must be from 1 to 1000"),
        ("rtx4090+1000000000x990pro", "count must be from 1 to 1000"),
        ("rtx4090++64GB", "has an empty part"),
        ("rtx4090+0GB", "memory must be more than 0"),
        ("nowhere.toml", "cannot be read"),
    ),
)
def test_what_is_not_known_is_said_with_what_is(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_machine(text)


def test_the_slowest_and_the_smallest_of_several_drives_bound_the_store() -> None:
    fast, slow = DRIVES["t705"], DRIVES["p5510"]
    machine = find_machine("rtx4090+t705+p5510")
    shares = stripe_shares([(drive.read_bytes_per_s, drive.write_bytes_per_s) for drive in (fast, slow)])
    assert shares == (8, 3)
    assert machine.hardware.read_bytes_per_s == min(fast.read_bytes_per_s * 11 / 8, slow.read_bytes_per_s * 11 / 3)
    assert machine.hardware.write_bytes_per_s == slow.write_bytes_per_s * 11 / 3
    assert machine.disk_bytes == fast.capacity_bytes * 11 // 8
    assert machine.endurance_bytes == fast.endurance_bytes * 11 / 8


def test_a_server_of_the_papers_is_a_part_like_others() -> None:
    more = find_machine("lohan-4090+p5510")
    assert len(more.drives) == 13 and more.host_bytes == 768 * 10**9


def test_a_file_tells_of_a_drive_that_the_catalogue_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    rates = "read_bytes_per_s = 3e9\nwrite_bytes_per_s = 2e9\n"
    file.write_text(f'base = "rtx3090"\ndisk_memory = "1TB"\n{rates}')
    (drive,) = find_machine(str(file)).drives
    assert (drive.capacity_bytes, drive.read_bytes_per_s, drive.write_bytes_per_s) == (10**12, 3e9, 2e9)


def test_a_file_may_tell_of_a_machine_without_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('device = "cpu"\ndevice_flops_per_s = 1e12\nhost_bytes_per_s = 40e9\n')
    machine = find_machine(str(file))
    hardware = machine.hardware
    assert hardware.cores_shared and hardware.device_update_params_per_s == hardware.update_params_per_s
    assert hardware.upload_bytes_per_s == hardware.download_bytes_per_s == 20e9
    assert machine.peak_flops_per_s == machine.price == 0


def test_a_file_changes_any_figure(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "rtx3090+990pro+64GB"\nread_bytes_per_s = 3e9\nhost_memory = "96GB"\n')
    machine = find_machine(str(file))
    assert machine.name == "mine" and machine.hardware.read_bytes_per_s == 3e9 and machine.host_bytes == 96 * 10**9
    for content, words in (
        ("base = ", "malformed"),
        ('base = "rtx3090"\ndisk_memory = "1TB"\nread_bytes_per_s = 3e9', "no drive.*write_bytes_per_s"),
        ('device = "cpu"', "needs device_flops_per_s"),
        ("cores_together = 2.0", "at most 1"),
        ("raed_bytes_per_s = 1e9", "did you mean read_bytes_per_s"),
        ("read_bytes_per_s = -1", "more than 0"),
        ('host_memory = "lots"', "not a size"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=words):
            find_machine(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    (
        ('device = "tpu"', "device must be 'cuda' or 'cpu'"),
        ('cores_shared = "yes"', "cores_shared must be true or false"),
        ("disk_together = 5.0", "disk_together is a share of a rate"),
        ("link_together = 7.0", "link_together is a share of a rate"),
    ),
)
def test_what_makes_no_sense_in_a_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        find_machine(str(file))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        find_machine(str(file))
