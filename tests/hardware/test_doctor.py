"""What is missing or slow is found, each with its fix."""

import errno
import os
import resource
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

from spillway import native
from spillway.hardware import doctor
from spillway.native import DiskEngine

Mount = namedtuple("Mount", "device mountpoint fstype opts")


def fixes(path: Path) -> dict[str, str]:
    return {finding.what.replace(str(path), "PATH"): finding.fix for finding in doctor.examine((path,))}


def test_an_engine_of_threads_says_how_to_allow_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskEngine, "backend", property(lambda _: "threads"))
    assert "io_uring_disabled=0" in fixes(tmp_path)["disk engine"]


@pytest.mark.parametrize(
    ("kind", "at", "words"),
    [
        ("nfs4", "", "not a local drive"),
        ("9p", "", "not a local drive"),  # WSL's /mnt/c
        ("tmpfs", "", "RAM disk"),
        ("ext4", "/", "the system drive"),
        ("xfs", "", ""),
    ],
)
def test_each_kind_of_file_system_has_its_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, at: str, words: str
) -> None:
    mounts = [Mount("none", "/", "ext4", ""), Mount("none", at or str(tmp_path), kind, "")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    found = fixes(tmp_path)["store PATH"]
    assert words in found and bool(found) == bool(words)


@pytest.mark.parametrize(
    ("error", "words"), [(errno.EINVAL, "page cache"), (errno.EROFS, "choose another path"), (errno.ENOENT, "another")]
)
def test_only_a_file_system_that_refuses_direct_io_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, words: str
) -> None:
    def refuses(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuses)
    assert words in doctor._direct_io(tmp_path).fix


@pytest.mark.parametrize(("limit", "is_low"), [(64 << 10, True), (64 << 30, False), (resource.RLIM_INFINITY, False)])
def test_little_memory_that_may_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, is_low: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert ("ulimit -l" in fixes(tmp_path)["memory that can be pinned"]) == is_low


def test_a_processor_without_wide_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel_name", lambda: "portable")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert "AVX2" in fixes(tmp_path)["processor"]


def test_a_card_with_fewer_lanes_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    for width, says in (((4, 16), True), ((16, 16), False), (None, False)):
        monkeypatch.setattr(doctor, "_link_width", lambda width=width: width)
        assert ("fewer lanes" in doctor._device().fix) == says


def test_most_of_the_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_host_bytes", lambda: psutil.virtual_memory().total // 3)
    assert "close other programs" in fixes(tmp_path)["host memory"]


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "it is a file" in doctor._direct_io(tmp_path / "file").fix
