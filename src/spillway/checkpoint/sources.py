"""Where weights come from: a module in memory, or the safetensors files of a model directory."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from spillway.spec.errors import UsageError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


# For the tensors of a checkpoint: the parameters of the model that are put together from several of them, or go by
# another name there, and which, in the order in which they lie one after another in the parameter.
Joined = Callable[[Collection[str]], dict[str, tuple[str, ...]]]


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong into a checkpoint, by name."""
    state = nn.Module.state_dict(model, keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a model takes from a checkpoint, as it stood when it was built: by canonical name its parameters and every
    name each has, and its persistent buffers, which are filled."""

    model: str  # for messages
    prefix: str  # of its base model, which checkpoints may leave out
    params: dict[str, nn.Parameter]
    aliases: dict[str, tuple[str, ...]]  # the canonical name first
    buffers: dict[str, torch.Tensor]
    ignored: tuple[str, ...]  # patterns of tensors in checkpoints that are no news

    @classmethod
    def of(cls, model: nn.Module) -> "Wanted":
        """All of a model."""
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        return cls(
            type(model).__name__,
            getattr(model, "base_model_prefix", ""),
            dict(model.named_parameters()),
            {found[0]: tuple(found) for found in names.values()},
            persistent_buffers(model),
            tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        )


class WeightSource(Protocol):
    """Reads parameters by canonical name, a piece at a time."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter, 1-D, on the CPU, in the source's dtype."""

    def done(self, names: Iterable[str]) -> None:
        """These parameters will not be read again."""


class MixedSource:
    """The parameters of a model, each from where it is: the files of a directory, or memory."""

    def __init__(self, originals: dict[str, nn.Parameter], on_disk: dict[str, tuple["DirectorySource", str]]) -> None:
        """`originals`: those of the model; of these, what is not `on_disk` is let go as it is stored. `on_disk`: the
        source of a parameter, and its name there."""
        self._originals = originals
        self._on_disk = on_disk

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource."""
        if name in self._on_disk:
            source, there = self._on_disk[name]
            return source.read(there, start, stop)
        return self._originals[name].detach().reshape(-1)[start:stop].cpu()

    def done(self, names: Iterable[str]) -> None:
        """See WeightSource."""
        for name in names:
            if name not in self._on_disk:
                self._originals.pop(name, None)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for source, _ in self._on_disk.values():
            source.close()


class TensorFile(Protocol):
    """One open file of a model directory."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor."""

    def is_float(self, key: str) -> bool:
        """Whether a tensor holds plain floating point numbers."""

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor."""

    def close(self) -> None:
        """Let go of the file."""


class SafetensorsFile:
    """A safetensors file. Never a whole tensor of more than one row is read at once."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError where it is none."""
        self._stack = ExitStack()
        try:
            self._file: Any = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read as safetensors ({error}): download or save it again") from error

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        """See TensorFile."""
        return tuple(self._file.get_slice(key).get_shape())

    def is_float(self, key: str) -> bool:
        """See TensorFile."""
        return self._file.get_slice(key).get_dtype() in ("F64", "F32", "F16", "BF16")

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """See TensorFile."""
        shape = self.shape(key)
        if not shape:
            return self._file.get_tensor(key).reshape(-1)[start:stop]
        row = torch.Size(shape[1:]).numel()
        first, last = start // row, -(-stop // row)
        rows = self._file.get_slice(key)[first:last].reshape(-1)
        return rows[start - first * row : stop - first * row]

    def close(self) -> None:
        """See TensorFile."""
        self._stack.close()


class PickledFile:
    """A .bin file that the user allowed; mapped, and unpickled with `weights_only`, which runs no code."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError where it holds anything but tensors."""
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else "it ends early"
            raise UsageError(f"{path} cannot be read as weights only ({first}): use a safetensors copy") from error
        self._tensors: dict[str, torch.Tensor] = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """See TensorFile."""
        return tuple(self._tensors[key].shape)

    def is_float(self, key: str) -> bool:
        """See TensorFile."""
        return self._tensors[key].dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """See TensorFile."""
        return self._tensors[key].reshape(-1)[start:stop]

    def close(self) -> None:
        """See TensorFile."""
        self._tensors = {}


class DirectorySource:
    """The weight files of a Hugging Face model directory, opened as needed."""

    def __init__(
        self, directory: Path, wanted: Wanted, allow_pickle: bool = False, joined: Joined = lambda keys: {}
    ) -> None:
        """`joined`: see Joined.

        Raises UsageError naming what is missing, of another shape, or no floating point weight. `unexpected` lists
        tensors that the model has no use for; `written_as` holds names and shapes of the tensors that a parameter was
        put together from, where it was.
        """
        self._directory = directory
        self._file_of = _files_of(directory, allow_pickle)
        self._open: dict[str, TensorFile] = {}
        made_of = joined(self._file_of.keys())
        self._keys: dict[str, tuple[str, ...]] = {}
        for name, names in wanted.aliases.items():
            found = self._find(names, wanted.prefix)
            self._keys[name] = (found,) if found else made_of.get(name, ())
        self._check(wanted)
        self.written_as = {
            name: tuple((key, self._handle(key).shape(key)) for key in keys)
            for name, keys in self._keys.items()
            if keys == made_of.get(name)
        }
        buffers = {name: key for name in wanted.buffers if (key := self._find((name,), wanted.prefix))}
        self._fill(wanted, buffers)
        used = {*(key for keys in self._keys.values() for key in keys), *buffers.values()}
        used |= {key for names in wanted.aliases.values() for name in names for key in _spellings(name, wanted.prefix)}
        ignored = [re.compile(text) for text in wanted.ignored]
        left = sorted(key for key in self._file_of if key not in used)
        self.unexpected = [key for key in left if not any(pattern.search(key) for pattern in ignored)]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As WeightSource has it."""
        keys, pieces, at = self._keys[name], [], 0
        if len(keys) == 1:
            return self._handle(keys[0]).read(keys[0], start, stop)
        for key in keys:
            size = math.prod(self._handle(key).shape(key))
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                pieces.append(self._handle(key).read(key, first, last))
            at += size
        return torch.cat(pieces)

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _find(self, names: tuple[str, ...], prefix: str) -> str:
        return next((key for name in names for key in _spellings(name, prefix) if key in self._file_of), "")

    def _handle(self, key: str) -> TensorFile:
        name = self._file_of[key]
        if name not in self._open:
            path = self._directory / name
            self._open[name] = SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)
        return self._open[name]

    def _check(self, wanted: Wanted) -> None:
        missing = [name for name, keys in self._keys.items() if not keys]
        if missing:
            raise UsageError(f"{self._directory} has no weights for {_some(missing)}: is it a {wanted.model}?")
        for name, keys in self._keys.items():
            shape = tuple(wanted.params[name].shape)
            shapes = [self._handle(key).shape(key) for key in keys]
            file = self._directory / self._file_of[keys[0]]
            if len(keys) == 1 and shapes[0] != shape:
                raise UsageError(f"{file}: {keys[0]} has the shape {shapes[0]} and the model wants {shape}")
            if sum(map(math.prod, shapes)) != math.prod(shape) or any(found[-1:] != shape[-1:] for found in shapes):
                raise UsageError(f"{file}: {_some(list(keys))} do not make up {name} of the shape {shape}")
            for key in keys:
                if not self._handle(key).is_float(key):
                    raise UsageError(
                        f"{self._directory / self._file_of[key]}: {key} holds no plain floating point numbers: a "
                        f"quantised checkpoint cannot be trained, take the one it was made from"
                    )

    def _fill(self, wanted: Wanted, buffers: dict[str, str]) -> None:
        for name, key in buffers.items():
            found, buffer = self._handle(key).shape(key), wanted.buffers[name]
            if found != tuple(buffer.shape):
                file = self._directory / self._file_of[key]
                raise UsageError(f"{file}: {key} has the shape {found} and the model wants {tuple(buffer.shape)}")
            buffer.copy_(self._handle(key).read(key, 0, buffer.numel()).reshape(buffer.shape))


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """A checkpoint of the base model leaves its prefix out, one of a larger model may have it in."""
    if not prefix:
        return (name,)
    return (name, name.removeprefix(prefix + "."), f"{prefix}.{name}")


def _files_of(directory: Path, allow_pickle: bool) -> dict[str, str]:
    """The file of every tensor. Safetensors where there are any, pickled weights only where allowed."""
    kinds = [(_SINGLE, _INDEX), *([(_PICKLED, _PICKLED_INDEX)] if allow_pickle else [])]
    for single, index in kinds:
        if (directory / index).exists():
            return _from_index(directory, directory / index)
        if (directory / single).exists():
            path = directory / single
            file = SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)
            keys = file.keys()
            file.close()
            return dict.fromkeys(keys, single)
    if any(directory.glob("*.bin")):
        raise UsageError(
            f"{directory} holds only pickled .bin weights: convert it to safetensors, or allow them with "
            f"allow_pickle=True"
        )
    raise UsageError(f"{directory} has no weights: {_SINGLE} or {_INDEX} is missing")


def _from_index(directory: Path, index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise UsageError(f"{index} is damaged: it has no weight_map; download the model again") from error
    absent = sorted({file for file in weight_map.values() if not (directory / file).exists()})
    if absent:
        raise UsageError(f"{directory} lacks {_some(absent)}, which its index names: download the model again")
    return dict(weight_map)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
