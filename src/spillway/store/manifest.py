"""The committed state of training: one small checksummed file, replaced atomically.

Format (JSON): {"version", "checksum" (SHA-256 of the canonical body), "body": Manifest}. Written to a temporary file,
synced, renamed, and the directory synced, after the data it names was synced; so it always names whole extents.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from spillway.spec.errors import DiskError
from spillway.spec.jsonable import from_json, to_json

VERSION = 1
_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """Where a unit of the committed step lies: `offset` in the striped address space."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything needed to go on from the end of a step."""

    step: int
    units: tuple[UnitRecord, ...]
    num_paths: int
    model_fingerprint: str  # names, shapes and dtypes of every parameter
    rng: dict[str, str] = field(default_factory=dict)  # device -> generator state in hexadecimal
    run: dict[str, str] = field(default_factory=dict)  # what the training loop wants back, as JSON texts


def save_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically and durably."""
    body = to_json(manifest)
    content = json.dumps({"version": VERSION, "checksum": _checksum(body), "body": body})
    temporary = directory / (_NAME + ".new")
    try:
        with open(temporary, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / _NAME)
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise DiskError(
            f"{directory / _NAME} cannot be written: {error.strerror}; the saved point before it is intact"
        ) from error


def load_manifest(directory: Path) -> Manifest | None:
    """The committed state, or None where nothing was ever committed. Raises DiskError for a damaged or foreign file."""
    path = directory / _NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        version, body = content["version"], content["body"]
        checksum = content["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise DiskError(f"{path} is damaged: it is not a manifest; restore it or start a new run") from error
    if version != VERSION:
        raise DiskError(
            f"{path} is of version {version} and this Spillway reads version {VERSION}: use the release that wrote it"
        )
    if checksum != _checksum(body):
        raise DiskError(f"{path} is damaged: its checksum does not match; restore it or start a new run")
    return from_json(Manifest, body)


def _checksum(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
