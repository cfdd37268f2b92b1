import dataclasses
import json
from pathlib import Path

import pytest

from spillway.spec.errors import DiskError
from spillway.store.disk import Geometry
from spillway.store.manifest import (
    Manifest,
    UnitRecord,
    load_manifest,
    load_manifests,
    manifest_files,
    reserve_manifests,
    save_manifest,
)

GEOMETRY = Geometry(("a", "b"), (2, 1))
MANIFEST = Manifest(3, (UnitRecord("a", 4096, 8192, "AAAA"),), GEOMETRY, "abc", {"cpu": "00ff"}, {"position": "{}"})


def test_a_manifest_survives_and_is_replaced_whole(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) is None
    save_manifest(tmp_path, MANIFEST)
    assert load_manifest(tmp_path) == MANIFEST
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000003.json"]


def test_a_manifest_takes_the_room_of_the_one_that_it_supersedes(tmp_path: Path) -> None:
    reserve_manifests(tmp_path, MANIFEST, keep_last=2)
    reserved = {file.stat().st_ino for file in tmp_path.iterdir()}
    for step in range(1, 6):
        save_manifest(tmp_path, dataclasses.replace(MANIFEST, step=step), keep_last=2)
        assert {file.stat().st_ino for file in tmp_path.iterdir()} == reserved
    assert [point.step for point in load_manifests(tmp_path)[0]] == [5, 4]
    large = dataclasses.replace(MANIFEST, step=6, run={"position": "x" * 10_000})
    save_manifest(tmp_path, large, keep_last=2)
    assert load_manifest(tmp_path) == large


def test_room_for_manifests_is_taken_once_and_the_largest_is_used(tmp_path: Path) -> None:
    for step in range(1, 4):
        reserve_manifests(tmp_path, MANIFEST)  # as every start of a run does
        save_manifest(tmp_path, dataclasses.replace(MANIFEST, step=step))
    reserve_manifests(tmp_path, MANIFEST)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "step.0.spare").write_text("")
    save_manifest(tmp_path, dataclasses.replace(MANIFEST, step=4))
    assert (tmp_path / "step.0.spare").stat().st_size == 0 and load_manifests(tmp_path)[0][0].step == 4
    reserve_manifests(tmp_path, MANIFEST)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_manifest_under_the_name_of_another_step_is_not_used(tmp_path: Path) -> None:
    save_manifest(tmp_path, MANIFEST)
    (tmp_path / "step-00000003.json").rename(tmp_path / "step-00000002.json")
    with pytest.raises(DiskError, match=r"step-00000002.json is damaged: it holds step 3"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.rstrip()[:-20], "is damaged"),
        (lambda text: text.replace('"step": 3', '"step": 4'), "its checksum does not match"),
        (lambda text: json.dumps({**json.loads(text), "version": 9}), "is of version 9"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_named(tmp_path: Path, damage: object, message: str) -> None:
    save_manifest(tmp_path, MANIFEST)
    path = tmp_path / "step-00000003.json"
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(DiskError, match=f"step-00000003.json.*{message}"):
        load_manifest(tmp_path)


def test_the_last_few_stay_and_a_damaged_one_is_stepped_over(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_manifest(tmp_path, dataclasses.replace(MANIFEST, step=step), keep_last=3)
    assert [step for step, _ in manifest_files(tmp_path)] == [5, 4, 3]
    (tmp_path / "step-00000005.json").write_text("{")
    good, bad = load_manifests(tmp_path)
    assert [manifest.step for manifest in good] == [4, 3]
    assert len(bad) == 1 and "step-00000005.json is damaged" in bad[0]
    # Training went on from step 3: what was saved after it is of another past.
    save_manifest(tmp_path, dataclasses.replace(MANIFEST, step=4), keep_last=3)
    assert [step for step, _ in manifest_files(tmp_path)] == [4, 3]
