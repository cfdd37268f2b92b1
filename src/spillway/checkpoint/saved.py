"""One saved point of a store, opened for reading: checked, and streamed without loading it."""

from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from spillway.model.units import Unit
from spillway.native import DiskEngine
from spillway.spec.errors import DamageError, DiskError
from spillway.spec.sizes import PAGE, align
from spillway.store.arena import Arena
from spillway.store.checks import ExtentChecks
from spillway.store.disk import Extent, StripedDisk, check_lengths
from spillway.store.layout import UnitLayout
from spillway.store.manifest import Manifest, UnitRecord

_WINDOW_BYTES = 32 << 20


class SavedPoint:
    """A ByteSource over what a manifest names. Holds the locks of the store paths while it is open."""

    def __init__(self, manifest: Manifest, units: tuple[Unit, ...]) -> None:
        """Raises DiskError where a file is missing, cut short, or in use by a run."""
        self.manifest = manifest
        self._units = units
        self._disk = StripedDisk(manifest.geometry, keep=True, may_write=False)
        self._engine = DiskEngine()
        self._windows: dict[str, torch.Tensor] = {}
        try:
            check_lengths(manifest.geometry, max(unit.offset + unit.num_bytes for unit in manifest.units))
        except DiskError:
            self.close()
            raise

    def stream(self, unit: int, name: str, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See ByteSource; every array has a window of its own."""
        window = self._windows.setdefault(name, Arena(_WINDOW_BYTES).buffer)
        part = self._units[unit].layout.component(name)
        base = self.manifest.units[unit].offset + (part.offset if part else 0)
        # As many elements at a time whatever the array, so that two of them can be streamed side by side.
        step = (window.numel() - 2 * PAGE) // 4 * (part.element_bytes if part else 1)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            first, last = start // PAGE * PAGE, align(stop, PAGE)
            self._disk.read(self._engine, Extent(base + first, last - first), window)
            yield start - begin, window[start - first : stop - first]

    def verify(self, progress: Callable[[int], None], names: tuple[str, ...] | None = None) -> None:
        """Read every array (or those of `names`) and compare it with its checksums. `progress` is called with bytes
        read. Raises DamageError for the first unit that is damaged, naming file and offset."""
        for index, unit in enumerate(self._units):
            found = ExtentChecks(unit.layout)
            expected = expected_checks(self.manifest, index, unit.layout)
            for part in unit.layout.components:
                if names is not None and part.name not in names:
                    found.copy_part(expected, part)
                    continue
                for start, content in self.stream(index, part.name, 0, part.num_bytes):
                    found.feed(part.offset + start, content)
                    progress(content.numel())
            compare(self.manifest, self.manifest.units[index], expected, found, self._disk)

    def close(self) -> None:
        """Give back the files and their locks."""
        self._engine.close()
        self._disk.close()

    def __enter__(self) -> "SavedPoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def expected_checks(manifest: Manifest, unit: int, layout: UnitLayout) -> ExtentChecks:
    """The checksums a manifest holds for a unit. Raises DamageError where they cannot be of this unit."""
    try:
        return ExtentChecks.from_text(layout, manifest.units[unit].checks)
    except (ValueError, IndexError) as error:
        raise DamageError(f"step {manifest.step} was saved for a model of another shape ({error})") from error


def compare(
    manifest: Manifest, record: UnitRecord, expected: ExtentChecks, found: ExtentChecks, disk: StripedDisk
) -> None:
    """Raise DamageError, naming file and offset, where a unit read back is not what was written."""
    difference = expected.first_difference(found)
    if difference is None:
        return
    offset, size = difference
    file, at = disk.geometry.where(record.offset + offset)
    raise DamageError(
        f"{file} is damaged at offset {at} ({size} bytes of {record.name}): it is not what step {manifest.step} "
        f"wrote; restore the file or start a new run"
    )
