from pathlib import Path
from types import SimpleNamespace

import pytest

from plan.profiles import MACHINE
from spillway.hardware import machine
from spillway.store.disk import Geometry


def test_a_measured_machine_has_the_drives_that_its_paths_lie_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"a": 1, "b": 2, "c": 2}
    for name in numbers:
        (tmp_path / name).mkdir()
    stat = Path.stat

    def on_drives(path: Path, **more: bool) -> object:
        found = stat(path, **more)
        return SimpleNamespace(st_dev=numbers[path.name], st_mode=found.st_mode) if path.name in numbers else found

    monkeypatch.setattr(machine, "measure", lambda *_: MACHINE)
    monkeypatch.setattr(machine, "endurance_of", lambda path: 6e14 if path.name == "a" else 12e14)
    paths = tuple(tmp_path / name for name in numbers)
    monkeypatch.setattr(machine, "geometry_of", lambda paths: Geometry(tuple(map(str, paths)), (2, 1, 1)))
    monkeypatch.setattr(machine, "free_on", lambda _: 10**12)
    monkeypatch.setattr(Path, "stat", on_drives)
    found = machine.this_machine(paths, device="cpu")
    monkeypatch.undo()
    assert len(found.drives) == 2 and found.disk_bytes == 10**12
    assert found.drives[0].read_bytes_per_s == MACHINE.read_bytes_per_s / 2
    assert sum(drive.capacity_bytes for drive in found.drives) == 10**12
    assert [drive.endurance_bytes for drive in found.drives] == [6e14, 12e14]
