"""Writes weights as sharded safetensors with an index, a piece at a time."""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from spillway.checkpoint.load import stream_bytes
from spillway.model.units import Unit
from spillway.spec.errors import DiskError
from spillway.store.layout import TensorPlace, UnitLayout
from spillway.store.placed import PlacedStore

MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float64: "F64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a shard, and how to get its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    unit: int  # -1: a buffer, in `tensor`
    begin: int
    tensor: torch.Tensor | None = None


def save_weights(
    store: PlacedStore,
    units: tuple[Unit, ...],
    buffers: dict[str, torch.Tensor],
    directory: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    only: int | None = None,
) -> list[str]:
    """Write every parameter, and persistent `buffers`, under the names of the model; tied parameters once. The files
    appear under their final names only when whole. `only`: the one unit to write, for a trial. Returns the file names.
    Raises DiskError when there is no room."""
    entries = [entry for entry in _entries(units) if only is None or entry.unit == only]
    shards = _shards(entries + list(_buffer_entries(buffers)), max_shard_bytes)
    names = [_shard_name(index, len(shards)) for index in range(len(shards))]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(store, directory / name, shard)
        _write_index(directory, names, shards)
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        raise DiskError(
            f"the model cannot be written to {directory}: {error.strerror}; the run itself is safe: free some "
            f"room and run the same command again"
        ) from error
    return names


def weights_bytes(units: tuple[Unit, ...]) -> int:
    """Bytes of all the shards together, headers aside."""
    return sum(entry.num_bytes for entry in _entries(units))


def _entries(units: tuple[Unit, ...]) -> Iterator[_Entry]:
    for index, unit in enumerate(units):
        for place in unit.layout.places:
            yield _entry(index, unit.layout, place)


def _entry(unit: int, layout: UnitLayout, place: TensorPlace) -> _Entry:
    begin, end = layout.byte_range(place)
    return _Entry(place.name, place.shape, place.dtype, end - begin, unit, begin)


def _buffer_entries(buffers: dict[str, torch.Tensor]) -> Iterator[_Entry]:
    for name, tensor in buffers.items():
        whole = tensor.detach().cpu().contiguous()
        yield _Entry(name, tuple(whole.shape), whole.dtype, whole.numel() * whole.element_size(), -1, 0, whole)


def _shards(entries: list[_Entry], max_bytes: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(store: PlacedStore, path: Path, shard: list[_Entry]) -> None:
    """The safetensors format: 8 bytes of header length, the header in JSON padded to 8 bytes, the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.num_bytes],
        }
        at += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + at)
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in shard:
            for piece in _pieces(store, entry):
                file.write(piece.numpy().data)
                _let_go_of_cache(file.fileno())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _pieces(store: PlacedStore, entry: _Entry) -> Iterator[torch.Tensor]:
    if entry.tensor is not None:
        if entry.num_bytes:
            yield entry.tensor.reshape(-1).view(torch.uint8)
        return
    for _, piece in stream_bytes(store, entry.unit, "weight", entry.begin, entry.begin + entry.num_bytes):
        yield piece


def _let_go_of_cache(fd: int) -> None:
    """What was written need not stay in the page cache, which counts as our memory in a container."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_index(directory: Path, names: list[str], shards: list[list[_Entry]]) -> None:
    index = directory / "model.safetensors.index.json"
    if len(shards) == 1:
        index.unlink(missing_ok=True)
        return
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
