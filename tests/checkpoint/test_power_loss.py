"""What a power failure leaves, unlike a kill: of what was not synced, any part, and names as of the last sync of their
directory."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.test_points import Run, same
from spillway.spec.plan import KeepPoints
from spillway.spec.sizes import PAGE

STEPS, IMAGES = 6, 8
Image = dict[str, bytes]


class Drive:
    """Watches the syncs of a store and knows what would be left of it: before and after each of them `images` gets what
    a failure at that moment leaves."""

    def __init__(self, store: Path, seed: int) -> None:
        self.images: list[Image] = []
        self._store = store
        self._random = random.Random(seed)
        self._names: dict[str, int] = {}  # durable ones, and their inodes
        self._contents: dict[int, bytes] = {}  # durable ones, by inode

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def watched(handle: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            if self._store not in (path, path.parent):
                sync(handle)
                return
            self.images.append(self._image())
            sync(handle)
            if path == self._store:
                self._names = {file.name: file.stat().st_ino for file in path.iterdir()}
            else:
                self._contents[os.fstat(handle).st_ino] = path.read_bytes()
            self.images.append(self._image())

        return watched

    def _image(self) -> Image:
        return {name: self._left_of(name, inode) for name, inode in self._names.items()}

    def _left_of(self, name: str, inode: int) -> bytes:
        """The durable content; of a store file each page may also be the one that was written since."""
        durable, file = self._contents.get(inode, b""), self._store / name
        if not name.startswith("spillway.data") or not file.exists():
            return durable
        now = file.read_bytes()
        pages = range(0, len(now), PAGE)
        return b"".join(self._random.choice((durable.ljust(len(now), b"\0"), now))[at : at + PAGE] for at in pages)


@pytest.mark.parametrize("states", ("disk", "host"))
def test_a_power_failure_at_any_sync_loses_no_more_than_a_kill(
    states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    where = {"states": states, "weights": states, "keep": KeepPoints(1, True)}
    drive = Drive(store, seed=3)
    with monkeypatch.context() as patch:
        drive.watch(patch)
        run = Run(store, **where)
        for step in range(STEPS):
            run.train(step + 1).save(background=states == "host")
        expected = run.end()
    assert len(drive.images) >= 3 * STEPS
    found = 0
    for image in random.Random(5).sample(drive.images, IMAGES):
        shutil.rmtree(store)
        store.mkdir()
        for name, content in image.items():
            (store / name).write_bytes(content)
        resumed = Run(store, resume=True, **where)
        found += resumed.optimizer.num_steps > 0
        assert same(resumed.train(STEPS).end(), expected), sorted(image)
    assert found > IMAGES // 2
