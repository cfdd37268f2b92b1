import json
from pathlib import Path

import pytest

from spillway.spec.errors import DiskError
from spillway.store.manifest import Manifest, UnitRecord, load_manifest, save_manifest

MANIFEST = Manifest(3, (UnitRecord("a", 4096, 8192),), 1, "abc", {"cpu": "00ff"}, {"position": "{}"})


def test_a_manifest_survives_and_is_replaced_whole(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) is None
    save_manifest(tmp_path, MANIFEST)
    assert load_manifest(tmp_path) == MANIFEST
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "is damaged"),
        (lambda text: text.replace('"step": 3', '"step": 4'), "its checksum does not match"),
        (lambda text: json.dumps({**json.loads(text), "version": 9}), "is of version 9"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_named(tmp_path: Path, damage: object, message: str) -> None:
    save_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(DiskError, match=f"manifest.json.*{message}"):
        load_manifest(tmp_path)
