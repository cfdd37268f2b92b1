"""Where weights come from: a module in memory, or the safetensors files of a model directory."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from spillway.spec.errors import UsageError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightSource(Protocol):
    """Reads parameters by canonical name, a piece at a time."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened parameter, 1-D, on the CPU, in the source's dtype."""

    def done(self, names: Iterable[str]) -> None:
        """These parameters will not be read again."""


class ModuleSource:
    """An ordinary module in memory. Its tensors are let go as they are stored."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        self._params = params

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource."""
        return self._params[name].detach().reshape(-1)[start:stop].cpu()

    def done(self, names: Iterable[str]) -> None:
        """See WeightSource."""
        for name in names:
            self._params.pop(name, None)


class DirectorySource:
    """The safetensors files of a Hugging Face model directory, opened as needed. Never a whole tensor of more than one
    row is read at once."""

    def __init__(self, directory: Path, model: nn.Module, aliases: dict[str, tuple[str, ...]]) -> None:
        """`aliases`: every name of each parameter, the canonical one first.

        Raises UsageError naming what is missing or of another shape.
        """
        self._directory = directory
        self._file_of = _files_of(directory)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        prefix = getattr(model, "base_model_prefix", "")
        self._keys = {
            name: next((key for alias in names for key in _spellings(alias, prefix) if key in self._file_of), "")
            for name, names in aliases.items()
        }
        self._check(model)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource."""
        view = self._handle(self._keys[name]).get_slice(self._keys[name])
        shape = view.get_shape()
        if not shape:
            return self._handle(self._keys[name]).get_tensor(self._keys[name]).reshape(-1)[start:stop]
        row = torch.Size(shape[1:]).numel()
        first, last = start // row, -(-stop // row)
        rows = view[first:last].reshape(-1)
        return rows[start - first * row : stop - first * row]

    def done(self, names: Iterable[str]) -> None:
        """See WeightSource."""

    def close(self) -> None:
        """Close the files."""
        self._open.clear()
        self._stack.close()

    def _handle(self, key: str) -> Any:
        file = self._file_of[key]
        if file not in self._open:
            path = self._directory / file
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise UsageError(
                    f"{path} cannot be read as safetensors ({error}): download or save it again"
                ) from error
        return self._open[file]

    def _check(self, model: nn.Module) -> None:
        params = dict(model.named_parameters())
        missing = [name for name, key in self._keys.items() if not key]
        if missing:
            raise UsageError(f"{self._directory} has no weights for {_some(missing)}: is it a {type(model).__name__}?")
        for name, key in self._keys.items():
            found, wanted = tuple(self._handle(key).get_slice(key).get_shape()), tuple(params[name].shape)
            if found != wanted:
                raise UsageError(
                    f"{self._directory / self._file_of[key]}: {key} has the shape {found} and the model wants {wanted}"
                )


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """A checkpoint of the base model leaves its prefix out, one of a larger model may have it in."""
    if not prefix:
        return (name,)
    return (name, name.removeprefix(prefix + "."), f"{prefix}.{name}")


def _files_of(directory: Path) -> dict[str, str]:
    index, single = directory / _INDEX, directory / _SINGLE
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise UsageError(f"{index} is damaged: it has no weight_map; download the model again") from error
        absent = sorted({file for file in weight_map.values() if not (directory / file).exists()})
        if absent:
            raise UsageError(f"{directory} lacks {_some(absent)}, which its index names: download the model again")
        return dict(weight_map)
    if single.exists():
        try:
            with safe_open(single, framework="pt", device="cpu") as file:
                return dict.fromkeys(file.keys(), _SINGLE)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{single} cannot be read as safetensors ({error}): download it again") from error
    if any(directory.glob("*.bin")):
        raise UsageError(f"{directory} holds pickled .bin weights, which can run code: convert it to safetensors first")
    raise UsageError(f"{directory} has no weights: {_SINGLE} or {_INDEX} is missing")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
