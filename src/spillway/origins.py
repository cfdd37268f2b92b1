"""Where the weights of a model are before it streams: in the directory that it, or a model built into it, was loaded
from, and in memory."""

import weakref
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from spillway.checkpoint.save import WrittenAs
from spillway.checkpoint.sources import DirectorySource, MixedSource, Wanted
from spillway.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Origin:
    """The directory a model on the meta device was loaded from, and what it takes from there."""

    directory: Path
    allow_pickle: bool
    wanted: Wanted


_origins: "weakref.WeakKeyDictionary[nn.Module, Origin]" = weakref.WeakKeyDictionary()


def note_origin(model: nn.Module, directory: Path, allow_pickle: bool) -> None:
    """Remember where the weights of a model that was just built on the meta device are."""
    _origins[model] = Origin(directory, allow_pickle, Wanted.of(model))


def loaded_in(model: nn.Module) -> dict[nn.Module, Origin]:
    """The models from a directory that a model is or has in it, the outermost first."""
    return {module: _origins[module] for module in model.modules() if module in _origins}


def comes_from(package: str, model: nn.Module) -> bool:
    """Whether its class comes from that package, such as transformers. Only then the package needs to be imported."""
    return any(kind.__module__.startswith(f"{package}.") for kind in type(model).__mro__)


def open_directory(model: nn.Module, origin: Origin) -> DirectorySource:
    """The weight files of a model that was loaded. Raises UsageError where they do not fit it."""
    wanted = origin.wanted
    if not comes_from("transformers", model):
        return DirectorySource(origin.directory, wanted, origin.allow_pickle)
    from spillway.integrations.huggingface import joined_weights

    return DirectorySource(
        origin.directory, wanted, origin.allow_pickle, lambda keys: joined_weights(model, wanted.aliases, keys)
    )


class Origins:
    """All sources of one model's weights. Bytes are read later, through `weights`."""

    def __init__(self, model: nn.Module, copies: dict[int, nn.Parameter]) -> None:
        """`copies`: by the id of a parameter on the meta device, the one that it has its first weights from. Raises
        UsageError where weights are nowhere, or files do not fit."""
        loaded = loaded_in(model)
        files = [open_directory(module, origin) for module, origin in loaded.items()]
        places = {
            id(param): (source, name)
            for origin, source in zip(loaded.values(), files, strict=True)
            for name, param in origin.wanted.params.items()
        }
        self.directories = [origin.directory for origin in loaded.values()]
        self.unexpected = [key for source in files for key in source.unexpected]
        self.originals: dict[str, nn.Parameter] = dict(model.named_parameters())
        on_disk: dict[str, tuple[DirectorySource, str]] = {}
        for name, param in self.originals.items():
            found = places.get(id(copies.get(id(param), param)))
            if found is not None and param.is_meta:
                on_disk[name] = found
            elif param.is_meta:
                raise UsageError(_nowhere(name, self.directories))
        self.weights = MixedSource(self.originals, on_disk)
        # Of a model within another one the names are not the checkpoint's.
        self.written_as: WrittenAs = {
            name: source.written_as[name]
            for name, (source, there) in on_disk.items()
            if name == there and name in source.written_as
        }
        self._num_params = len(self.originals)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was let go yet."""
        return len(self.originals) == self._num_params

    @property
    def host_bytes(self) -> int:
        """Of parameters that are in host memory now."""
        return sum(param.numel() * param.element_size() for param in self.originals.values() if _is_host(param))


def _is_host(param: nn.Parameter) -> bool:
    return param.device.type == "cpu"


def _nowhere(name: str, directories: list[Path]) -> str:
    if not directories:
        return "the model is on the meta device and was not made by spillway.load: there are no weights"
    return (
        f"{name} is on the meta device and is not of {', '.join(map(str, directories))}: it has no weights (give what "
        f"is built onto a model from spillway.load its own in memory; adapters of peft, with spillway.add_adapter)"
    )
