"""Which of the saved points in a directory a model can go on from."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from spillway.model.units import Unit
from spillway.store.disk import Extent
from spillway.store.manifest import Manifest, file_name, load_manifests
from spillway.store.space import overlap


@dataclass(frozen=True, slots=True)
class Usable:
    """Saved points, the newest first, and a sentence for each other one that says why it is none of them."""

    points: tuple[Manifest, ...]
    problems: tuple[str, ...]


def usable(directory: Path, units: tuple[Unit, ...]) -> Usable:
    """Those of this model that lie in one store beside each other. Raises DiskError where a file cannot be read now."""
    good, bad = load_manifests(directory)
    # What a move that was killed has left of the store before is another store's, and no news.
    generation = max((point.geometry.generation for point in good), default=0)
    points: list[Manifest] = []
    for point in (point for point in good if point.geometry.generation == generation):
        if point.model_fingerprint != fingerprint(units):
            bad.append(f"{directory / file_name(point.step)} is of another model and is not used")
        elif not _lie_apart([*points, point]):
            bad.append(f"{directory / file_name(point.step)} is of another run and is not used")
        else:
            points.append(point)
    return Usable(tuple(points), tuple(bad))


def fingerprint(units: tuple[Unit, ...]) -> str:
    """Names, shapes and dtypes of every parameter, in short."""
    described = [
        (
            unit.name,
            repr(unit.layout.state_format),
            [(p.name, p.shape, str(p.dtype), p.trainable) for p in unit.layout.places],
        )
        for unit in units
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _lie_apart(points: list[Manifest]) -> bool:
    """Whether no unit lies where, in another of these points, another one does."""
    owners: dict[Extent, int] = {}
    for point in points:
        for unit, record in enumerate(point.units):
            if owners.setdefault(Extent(record.offset, record.num_bytes), unit) != unit:
                return False
    return overlap(owners) is None
