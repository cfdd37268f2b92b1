"""Writes weights as sharded safetensors with an index, a piece at a time."""

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from spillway.checkpoint.load import ByteSource
from spillway.durable import sync_directory, write_whole
from spillway.model.units import Unit
from spillway.optim.update import join_master
from spillway.spec.errors import DiskError
from spillway.spec.sizes import format_size
from spillway.store.disk import available
from spillway.store.layout import Component

MAX_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
# Per parameter: names and shapes of the tensors that a checkpoint has in its place.
WrittenAs = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
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
    end: int
    stored: torch.dtype  # as it is at rest
    below: Component | None = None  # of a 16-bit weight: what its master has beside it
    tensor: torch.Tensor | None = None


def save_weights(
    source: ByteSource,
    units: tuple[Unit, ...],
    buffers: dict[str, torch.Tensor],
    directory: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    only: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda _: None,
    written_as: WrittenAs | None = None,
) -> list[str]:
    """Write every parameter, and persistent `buffers`, under the names of the model; tied parameters once. The files
    appear under their final names only when all are whole; where there is no room for a model beside one that was
    written before, one after another, and without an index meanwhile. `only`: the one unit to write, for a trial.
    `dtype`: what floating point parameters become; wider ones than bfloat16 get every bit of the master. `progress` is
    called with bytes written. `written_as`: parameters that go to several tensors one after another, with their names
    and shapes. Returns the file names. Raises DiskError when there is no room."""
    entries = [entry for entry in _entries(units, dtype, written_as or {}) if only is None or entry.unit == only]
    shards = _shards(entries + list(_buffer_entries(buffers)), max_shard_bytes)
    names = [_shard_name(index, len(shards)) for index in range(len(shards))]
    with _writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _clear(directory)
        beside = available(directory) > sum(entry.num_bytes for shard in shards for entry in shard)
        if not beside:
            (directory / _INDEX).unlink(missing_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(source, directory / name, shard, progress)
            if not beside:
                os.replace(_new(directory / name), directory / name)
        write_whole(_new(directory / _INDEX), _index(names, shards))
        finish_save(directory)
    return names


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    """Errors within are of the drive, and leave it the room that was taken."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            _clear(directory)
        if isinstance(error, DiskError):
            raise
        raise DiskError(
            f"the model cannot be written to {directory}: {error.strerror}: free some room there"
        ) from error


def refuse_full(directory: Path, num_bytes: int, elsewhere: str) -> None:
    """Raise DiskError where a directory has no room for so many bytes of weights. What an earlier writing has left is
    put in its place, or removed; shards of a model that lies there give way one after another. `elsewhere`: what to
    choose instead."""
    with _writing_to(directory):
        _clear(directory)
        free = available(directory)
        before = sum(file.stat().st_size for file in directory.glob("model*.safetensors"))
    if num_bytes > free and num_bytes + min(num_bytes, MAX_SHARD_BYTES) > free + before:
        raise DiskError(
            f"the model takes {format_size(num_bytes)} in {directory} and {format_size(free)} are free there: free "
            f"some or choose another {elsewhere}"
        )


def _clear(directory: Path) -> None:
    """Of what was written and not put in its place: that, if all of it is there, and nothing otherwise."""
    if not finish_save(directory):
        for left in directory.glob("model*.safetensors.new"):
            left.unlink()


def weights_bytes(units: tuple[Unit, ...], dtype: torch.dtype | None = None) -> int:
    """Bytes of all the shards together, headers aside."""
    return sum(entry.num_bytes for entry in _entries(units, dtype, {}))


def _entries(units: tuple[Unit, ...], dtype: torch.dtype | None, written_as: WrittenAs) -> Iterator[_Entry]:
    for index, unit in enumerate(units):
        below = next((part for part in unit.layout.components if part.name in ("low", "master")), None)
        for place in unit.layout.places:
            written = dtype if dtype is not None and place.dtype.is_floating_point else place.dtype
            begin, _ = unit.layout.byte_range(place)
            for name, shape in written_as.get(place.name, ((place.name, place.shape),)):
                numel = math.prod(shape)
                end = begin + numel * place.dtype.itemsize
                size = numel * written.itemsize
                beside = below if place.trainable else None
                yield _Entry(name, shape, written, size, index, begin, end, place.dtype, beside)
                begin = end


def _buffer_entries(buffers: dict[str, torch.Tensor]) -> Iterator[_Entry]:
    for name, tensor in buffers.items():
        whole = tensor.detach().cpu().contiguous()
        size = whole.numel() * whole.element_size()
        yield _Entry(name, tuple(whole.shape), whole.dtype, size, -1, 0, size, whole.dtype, tensor=whole)


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


def _write_shard(source: ByteSource, path: Path, shard: list[_Entry], progress: Callable[[int], None]) -> None:
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
    with open(_new(path), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + at)
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in shard:
            for piece in _pieces(source, entry):
                file.write(piece.numpy().data)
                _let_go_of_cache(file.fileno())
                progress(piece.numel())
        file.flush()
        os.fsync(file.fileno())


def finish_save(directory: Path) -> bool:
    """Put the files of a model that was written whole in the place of those before; also where that was interrupted.
    Returns whether there was anything to do. Raises OSError."""
    ready, index = _new(directory / _INDEX), directory / _INDEX
    if not ready.exists():
        return False
    names = sorted(set(json.loads(ready.read_text())["weight_map"].values()))
    index.unlink(missing_ok=True)  # until the new one is there the shards are not all of one model
    for name in names:
        if _new(directory / name).exists():
            os.replace(_new(directory / name), directory / name)
    _remove_others(directory, names)
    sync_directory(directory)
    if len(names) == 1:
        ready.unlink()  # a model of one file has none
    else:
        os.replace(ready, index)
    sync_directory(directory)
    return True


def _new(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _pieces(source: ByteSource, entry: _Entry) -> Iterator[torch.Tensor]:
    if entry.tensor is not None:
        if entry.num_bytes:
            yield entry.tensor.reshape(-1).view(torch.uint8)
        return
    weights = source.stream(entry.unit, "weight", entry.begin, entry.end)
    if entry.dtype is entry.stored:
        yield from (piece for _, piece in weights)
    elif entry.below is not None:
        size, kind = entry.below.element_bytes, entry.below.dtype
        beside = source.stream(entry.unit, entry.below.name, entry.begin // 2 * size, entry.end // 2 * size)
        if entry.below.name == "master":
            yield from (piece.view(kind).to(entry.dtype).view(torch.uint8) for _, piece in beside)
            return
        for (_, weight), (_, low) in zip(weights, beside, strict=True):
            master = join_master(weight.view(torch.bfloat16), low.view(kind))
            yield master.to(entry.dtype).view(torch.uint8)
    else:
        for _, piece in weights:
            yield piece.view(entry.stored).to(entry.dtype).view(torch.uint8)


def _let_go_of_cache(fd: int) -> None:
    """What was written need not stay in the page cache, which counts as our memory in a container."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _remove_others(directory: Path, names: list[str]) -> None:
    """Weights that were written there before in other pieces: a loader might take them."""
    for file in directory.glob("model*.safetensors"):
        if file.name not in names and _SHARD.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _index(names: list[str], shards: list[list[_Entry]]) -> str:
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
