"""Measuring takes no more than there is."""

import shutil
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spillway.hardware import bandwidth, cache, probe
from spillway.hardware.bandwidth import Drives
from spillway.hardware.block import step_flops
from spillway.hardware.others import Others
from spillway.hardware.timing import kept_together
from spillway.native import Batch, DiskEngine
from spillway.spec.hardware import HardwareSpec
from spillway.spec.state import EXACT
from store.geometries import even_geometry

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other tests measure, too, once for all."""
    monkeypatch.setattr(probe, "_measured", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_on_a_drive_that_is_nearly_full_a_quarter_of_what_is_free_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = []
    run = DiskEngine.run

    def note(self: DiskEngine, batch: Batch, is_write: bool) -> None:
        largest.append(int(batch["num_bytes"].sum()))
        run(self, batch, is_write)

    monkeypatch.setattr(DiskEngine, "run", note)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, (1 << 30) - (16 << 20), 16 << 20))
    probe.measure(torch.device("cpu"), torch.float32, even_geometry((tmp_path,)), 16, 64, EXACT, 1 << 30, 1 << 30)
    assert 0 < max(largest) <= 4 << 20
    assert not list(tmp_path.iterdir())


def blocks_of(monkeypatch: pytest.MonkeyPatch, flops_per_s: float) -> list[tuple[int, int]]:
    """Rows and width of every block that is made, on a device so fast; the first shows how fast it is."""
    asked: list[tuple[int, int]] = []

    def note(device: torch.device, dtype: torch.dtype, rows: int, hidden: int) -> SimpleNamespace:
        asked.append((rows, hidden))
        return SimpleNamespace(flops=flops_per_s * 0.01, step=lambda: time.sleep(0.01))

    monkeypatch.setattr(probe, "Block", note)
    return asked


def test_the_block_that_is_measured_fits_the_room_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = blocks_of(monkeypatch, 1e15)
    for room in (1 << 22, 1 << 24, 1 << 34):
        probe.measure(torch.device("cpu"), torch.bfloat16, None, 1024, 1536, EXACT, 1 << 34, room)
    (few, narrow), (more, wider), most = asked[1::2]
    assert few < more <= most[0] == 1024 and narrow < wider < most[1] == 1536
    assert few * narrow * 2 * 32 <= 1 << 22


def test_the_slower_the_device_the_smaller_the_block_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = []
    for rate in (1e12, 1e11, 1e10, 1e9):
        probe.forget(torch.device("cpu"))
        asked = blocks_of(monkeypatch, rate)
        probe.measure(torch.device("cpu"), torch.bfloat16, None, 1024, 1536, EXACT, 1 << 34, 1 << 34)
        flops.append(step_flops(*asked[1]) / rate)
        assert all(width % 64 == 0 for _, width in asked)
    assert max(flops) < 2.1


def on_drives(monkeypatch: pytest.MonkeyPatch, drives: dict[Path, tuple[int, float]]) -> None:
    """Paths lie on drives of these numbers, each with its rate."""
    true_stat = Path.stat

    def stat(path: Path, **more: bool) -> object:
        found = true_stat(path, **more)
        return SimpleNamespace(st_dev=drives[path][0], st_mode=found.st_mode) if path in drives else found

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(bandwidth, "drive_rates", lambda one, _: Drives(drives[one[0]][1], drives[one[0]][1], 1.0))


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ((6e9, 6e9), (1, 1)),
        ((6e9, 5.8e9), (1, 1)),
        ((8e9, 2e9), (4, 1)),
        ((6e9, 3e9, 3e9), (2, 1, 1)),
        ((8e9, 1e8), (8, 1)),
    ],
)
def test_a_faster_drive_holds_more(
    rates: tuple[float, ...], shares: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tuple(tmp_path / str(index) for index in range(len(rates)))
    on_drives(monkeypatch, {path: (number, rates[number]) for number, path in enumerate(paths)})
    assert bandwidth.measure_shares(paths) == shares
    assert bandwidth.measure_shares(paths[:1]) == (1,)


def test_drives_are_measured_with_all_of_them_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight at a time lies on every drive, as in training."""
    paths, asked = tuple(tmp_path / name for name in "ab"), list[set[int]]()
    moved = DiskEngine.run

    def run(engine: DiskEngine, batch: Batch, is_write: bool) -> None:
        in_flight = batch[:4]
        asked.append(set(in_flight["fd"].tolist()))
        assert in_flight["num_bytes"].sum() <= 8 << 20
        moved(engine, batch, is_write)

    monkeypatch.setattr(DiskEngine, "run", run)
    for path in paths:
        path.mkdir()
    rates = bandwidth.drive_rates(paths, (2, 1), 12 << 20)
    assert asked and all(len(files) == 2 for files in asked) and rates.read > 0


def test_paths_on_one_drive_share_what_it_is_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = tuple(tmp_path / name for name in "abc")
    on_drives(monkeypatch, {paths[0]: (1, 8e9), paths[1]: (2, 2e9), paths[2]: (1, 8e9)})
    assert bandwidth.measure_shares(paths) == (2, 1, 2)
    assert bandwidth.measure_shares((paths[0], paths[2])) == (1, 1)


def test_directories_that_were_made_to_measure_in_are_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with bandwidth.directories((tmp_path / "new" / "store", tmp_path / "there")):
        assert (tmp_path / "new" / "store").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_work_that_others_slow_down_is_not_repeated_by_a_count_of_what_it_took_alone() -> None:
    # It took a microsecond alone and a millisecond now: as often as it fitted into the other's time would be for ever.
    calls = {"short": 0, "long": 0}

    def short() -> None:
        calls["short"] += 1
        time.sleep(1e-3)

    def long() -> None:
        calls["long"] += 1
        time.sleep(0.2)

    assert kept_together(short, long, 1e-6, 0.2) <= 0.6
    assert 0 < calls["short"] < 2000 and calls["long"] >= 3


def rates_of(path: Path) -> HardwareSpec:
    return probe.measure(torch.device("cpu"), torch.float32, even_geometry((path,)), 16, 64, EXACT, 1 << 28, 1 << 28)


def test_what_one_process_has_measured_another_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Others, "disturb", False)
    first = rates_of(tmp_path)
    monkeypatch.setattr(probe, "_measured", {})  # another process
    asked = blocks_of(monkeypatch, 1e12)
    assert rates_of(tmp_path) == first and not asked
    tomorrow = time.time() + 24 * 3600
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    monkeypatch.setattr(probe, "_measured", {})
    rates_of(tmp_path)
    assert asked


def test_what_was_measured_while_others_were_busy_is_soon_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Others, "disturb", True)
    rates_of(tmp_path)
    for minutes, again in ((9, False), (11, True)):
        later = time.time() + 60 * minutes
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda later=later: later)
            patched.setattr(probe, "_measured", {})
            asked = blocks_of(patched, 1e12)
            rates_of(tmp_path)
        assert bool(asked) == again


def test_rates_that_cannot_be_kept_or_read_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rates_of(tmp_path)
    (kept,) = cache.cache_directory().glob("rates-*.json")
    kept.write_text('{"half": [')
    monkeypatch.setattr(probe, "_measured", {})
    asked = blocks_of(monkeypatch, 1e12)
    rates_of(tmp_path)
    assert asked
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(probe, "_measured", {})
    assert rates_of(tmp_path).cores_shared == first.cores_shared


def test_nothing_that_is_measured_goes_on_after_an_interrupt_or_an_error() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def slow() -> None:
        time.sleep(0.3)
        ended.append(True)

    def fails() -> None:
        raise OSError("the drive is gone")

    ended: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        kept_together(interrupted, slow, 0.01, 0.3)
    assert ended
    with pytest.raises(OSError, match="the drive is gone"):
        kept_together(lambda: time.sleep(0.01), fails, 0.01, 0.01)
