"""What a run showed of the machine is what the next one is planned with."""

from dataclasses import replace
from pathlib import Path

import pytest

from plan import profiles
from spillway.hardware.calibration import as_seen, host_extra, is_doubtful, note_host_peak, note_rates
from spillway.spec.hardware import HardwareSpec

_PROBED = replace(profiles.MACHINE, device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_rates_of_a_run_are_those_of_the_next_plan_and_later_runs_count_half(tmp_path: Path) -> None:
    probed, here = _PROBED, (tmp_path,)
    assert as_seen(probed, here) == probed
    slower = replace(probed, read_bytes_per_s=0.8 * probed.read_bytes_per_s)
    note_rates(here, probed, slower)
    assert as_seen(probed, here) == slower
    note_rates(here, probed, probed)
    assert as_seen(probed, here).read_bytes_per_s == pytest.approx(0.9 * probed.read_bytes_per_s)


def test_a_disturbed_run_and_a_damaged_file_are_not_believed(tmp_path: Path) -> None:
    probed, here = _PROBED, (tmp_path,)
    disturbed = replace(
        probed,
        write_bytes_per_s=probed.write_bytes_per_s / 100,
        read_bytes_per_s=probed.read_bytes_per_s / 1.5,
    )
    note_rates(here, probed, disturbed)
    assert as_seen(probed, here) == replace(probed, read_bytes_per_s=pytest.approx(probed.read_bytes_per_s / 1.5))
    assert is_doubtful(here, probed, disturbed) and not is_doubtful(here, probed, as_seen(probed, here))
    (file,) = (tmp_path / "spillway").iterdir()
    file.write_text('{"write_bytes_per_s": "x"')
    assert as_seen(probed, here) == probed


def test_a_drive_that_is_slow_for_longer_than_one_measures_is_believed_the_second_time(tmp_path: Path) -> None:
    probed, here = _PROBED, (tmp_path,)

    def at(share: float) -> HardwareSpec:
        return replace(probed, write_bytes_per_s=share * probed.write_bytes_per_s)

    note_rates(here, probed, at(0.3))
    assert as_seen(probed, here) == probed and is_doubtful(here, probed, at(0.3))
    note_rates(here, probed, at(0.32))
    assert as_seen(probed, here) == at(0.32) and not is_doubtful(here, probed, at(0.3))
    note_rates(here, probed, at(0.28))
    assert as_seen(probed, here).write_bytes_per_s == pytest.approx(at(0.3).write_bytes_per_s)
    for share, believed in ((1.0, 0.3), (0.1, 0.3), (1.0, 0.3), (0.9, 0.9)):  # another disturbance is none of the first
        note_rates(here, probed, at(share))
        assert as_seen(probed, here).write_bytes_per_s == pytest.approx(at(believed).write_bytes_per_s)


def test_what_runs_take_of_the_host_beside_their_plans_is_kept(tmp_path: Path) -> None:
    assert host_extra((tmp_path,), "cpu") == 0
    note_host_peak((tmp_path,), "cpu", planned=1000, measured=900)
    note_host_peak((tmp_path,), "cpu", planned=1000, measured=800)
    assert host_extra((tmp_path,), "cpu") == -150
