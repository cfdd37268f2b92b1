"""Machines put together from known parts."""

from pathlib import Path

import pytest

from spillway.hardware.catalogue import DRIVES, GPUS, SERVERS, find_machine
from spillway.spec.errors import UsageError


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
        ("rtx4090+0x990pro", "count must be at least 1"),
        ("rtx4090+0GB", "memory must be at least 1GB"),
        ("nowhere.toml", "cannot be read"),
    ),
)
def test_what_is_not_known_is_said_with_what_is(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_machine(text)


def test_a_file_changes_any_figure(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "rtx3090+990pro+64GB"\nread_bytes_per_s = 3e9\nhost_memory = "96GB"\n')
    machine = find_machine(str(file))
    assert machine.name == "mine" and machine.hardware.read_bytes_per_s == 3e9 and machine.host_bytes == 96 * 10**9
    for content, words in (
        ("base = ", "malformed"),
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
