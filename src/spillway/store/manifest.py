"""What is committed: one small checksummed file per saved point, each written atomically.

Format (JSON): {"version", "checksum" (SHA-256 of the canonical body), "body": Manifest}. Written to a spare file, which
is synced, renamed, and the directory synced, after the data it names was synced; so it always names whole extents. The
file with the highest step is the newest saved point. One that is superseded becomes the spare file: a drive that others
have filled meanwhile has room for the next all the same.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path

from spillway.durable import reserve_spare, sync_directory, write_into
from spillway.spec.errors import DiskError
from spillway.spec.jsonable import from_json, to_json
from spillway.store.disk import Geometry

VERSION = 6
_NAME = re.compile(r"step-(\d{8,})\.json")
_SPARE = "step.{}.spare"


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """Where a unit of the committed step lies: `offset` in the striped address space."""

    name: str
    offset: int
    num_bytes: int
    checks: str = ""  # CRC-32C of its pieces, see store.checks
    num_updates: int = 0  # that it has seen: steps which did not reach it are not among them


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to go on from the end of a step."""

    step: int
    units: tuple[UnitRecord, ...]
    geometry: Geometry
    model_fingerprint: str  # names, shapes and dtypes of every parameter
    rng: dict[str, str] = field(default_factory=dict)  # generator -> its state as text
    run: dict[str, str] = field(default_factory=dict)  # what the training loop wants back, as JSON texts
    buffers: dict[str, str] = field(default_factory=dict)  # persistent buffers by name, base 64 of their bytes
    in_place: bool = False  # the run has one copy of its state: going on from there overwrites this point


def save_manifest(directory: Path, manifest: Manifest, keep_last: int = 1) -> None:
    """Write the manifest atomically and durably, then remove all but the last `keep_last`, and any of a
    later step."""
    path = directory / file_name(manifest.step)
    try:
        write_into(_spare(directory), path, _text(manifest))
        files = manifest_files(directory)
        # Later ones were found damaged: training went on from before them.
        later = [file for step, file in files if step > manifest.step]
        _remove(later + [file for step, file in files if step <= manifest.step][keep_last:])
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}; the saved point before it is intact") from error


def reserve_manifests(directory: Path, like: Manifest, keep_last: int = 1) -> None:
    """Take the room on the drive for as many as are kept and the one that is being written, if they are like this one.
    Raises DiskError."""
    num_bytes, needed = len(_text(like)), max(keep_last + 1 - len(manifest_files(directory)), 0)
    known = spare_files(directory)
    new = (file for number in count() if (file := directory / _SPARE.format(number)) not in known)
    try:
        for spare in islice(chain(known, new), needed):
            reserve_spare(spare, num_bytes)
        for surplus in known[needed:]:
            surplus.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(f"there is no room for saved points in {directory}: {error.strerror}") from error


def file_name(step: int) -> str:
    """Of a saved point, in the first store path."""
    return f"step-{step:08d}.json"


def drop_manifests(directory: Path, kept: set[int]) -> None:
    """Remove the saved points of other steps, durably: what they name may be overwritten afterwards."""
    others = [file for step, file in manifest_files(directory) if step not in kept]
    if others:
        _remove(others)
        sync_directory(directory)


def _remove(files: list[Path]) -> None:
    """Of saved points that are of no more use; the room of one is kept."""
    for file in files[:-1]:
        file.unlink(missing_ok=True)
    for file in files[-1:]:
        os.replace(file, file.with_name(_SPARE.format(file.stem)))


def _spare(directory: Path) -> Path:
    """One of the files with room, or a new one."""
    return next(iter(spare_files(directory)), directory / _SPARE.format(0))


def manifest_files(directory: Path) -> list[tuple[int, Path]]:
    """Step and file of every saved point, the newest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), file) for file in directory.iterdir() if (match := _NAME.fullmatch(file.name))]
    return sorted(found, reverse=True)


def spare_files(directory: Path) -> list[Path]:
    """Those that have room for saved points to come, the largest first."""
    return sorted(directory.glob(_SPARE.format("*")), key=lambda file: file.stat().st_size, reverse=True)


def load_manifests(directory: Path) -> tuple[list[Manifest], list[str]]:
    """Every saved point, the newest first, and a sentence for each that is damaged or of another version. Raises
    DiskError where a file cannot be read now: perhaps it is whole."""
    good, bad = list[Manifest](), list[str]()
    for _, file in manifest_files(directory):
        with suppress(FileNotFoundError):  # a run may have replaced it meanwhile
            found = _read(file)
            if isinstance(found, Manifest):
                good.append(found)
            else:
                bad.append(found)
    return good, bad


def load_manifest(directory: Path) -> Manifest | None:
    """The newest saved point, or None where nothing was ever committed. Raises DiskError where none can be read."""
    good, bad = load_manifests(directory)
    if good:
        return good[0]
    if bad:
        raise DiskError(bad[0])
    return None


def _read(path: Path) -> Manifest | str:
    """What it holds, or why that is of no use."""
    try:
        text = path.read_bytes()
        path.stat()  # a run that goes on may be writing the next one over it
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DiskError(f"{path} cannot be read ({error.strerror}): look at its drive, then try again") from error
    try:
        content = json.loads(text)
        version, body = content["version"], content["body"]
        checksum = content["checksum"]
    except (ValueError, KeyError, TypeError):
        return f"{path} is damaged: it is not a manifest; restore it or start a new run"
    if version != VERSION:
        return (
            f"{path} is of version {version} and this Spillway reads version {VERSION}: use the release that wrote it"
        )
    if checksum != _checksum(body):
        return f"{path} is damaged: its checksum does not match; restore it or start a new run"
    found = from_json(Manifest, body)
    if path.name != file_name(found.step):
        return f"{path} is damaged: it holds step {found.step}; restore it or start a new run"
    return found


def _text(manifest: Manifest) -> str:
    body = to_json(manifest)
    return json.dumps({"version": VERSION, "checksum": _checksum(body), "body": body})


def _checksum(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
