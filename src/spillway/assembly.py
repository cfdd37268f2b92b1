"""A model and all that makes it stream, put together: for training and for forwards alone."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from spillway.checkpoint.load import load_weights
from spillway.checkpoint.place import place_store, store_paths
from spillway.checkpoint.points import SavedPoints
from spillway.checkpoint.save import WrittenAs
from spillway.checkpoint.sources import DirectorySource, ModuleSource, WeightSource
from spillway.model.guards import guard
from spillway.model.units import find_units
from spillway.optim.optimizer import StreamingOptimizer
from spillway.plan.request import PlanRequest, space_of
from spillway.planner import Planner, make_budget
from spillway.runtime.device import Device, open_device
from spillway.runtime.session import Session
from spillway.spec.errors import UsageError
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Placement, Plan
from spillway.spec.state import StateFormat
from spillway.store.placed import PlacedStore


@dataclass(frozen=True, slots=True)
class Origin:
    """The directory a model on the meta device was loaded from."""

    directory: Path
    allow_pickle: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model may stream: paths on fast drives, the device, and how much of each tier (None: what is free)."""

    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    device: str
    device_memory: str | int | None
    host_memory: str | int | None
    disk_memory: str | int | None


@dataclass(slots=True)
class Prepared:
    """What belongs to a prepared model."""

    session: Session
    points: SavedPoints
    budget: Budget
    planner: Planner
    origin: Path | None
    weight_bytes: int  # of all units, as loaded
    extent_bytes: int  # of all units, as saved
    unexpected: list[str]  # tensors of the model directory that the model has no use for
    written_as: WrittenAs  # parameters that its checkpoint has in another form
    in_memory: dict[str, torch.Tensor]  # its parameters as they were before, where it was not loaded from a directory
    optimizer: StreamingOptimizer | None = None  # None where it is not trained
    on_load: Callable[[int], None] | None = None  # told of the bytes of each window while weights are loaded


origins: "weakref.WeakKeyDictionary[nn.Module, Origin]" = weakref.WeakKeyDictionary()
_prepared: "weakref.WeakKeyDictionary[nn.Module, Prepared]" = weakref.WeakKeyDictionary()


def prepared(model: nn.Module) -> Prepared:
    """What belongs to a model that went through `prepare` or `stream`. Raises UsageError for any other."""
    found = _prepared.get(model)
    if found is None:
        raise UsageError("this model did not go through spillway.prepare")
    return found


def check_fresh(model: nn.Module) -> None:
    """Raise UsageError for a model that streams already, or that has no weights."""
    wrapped = any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules())
    if wrapped or model._compiled_call_impl is not None:
        raise UsageError(
            "torch.compile on a whole model leaves no blocks to stream, and as a function it renames their parameters: "
            "compile the blocks in place instead, as in `for block in model.model.layers: block.compile()`"
        )
    if model in _prepared:
        raise UsageError("this model was prepared before: build or load it anew")
    if model not in origins and any(param.is_meta for param in model.parameters()):
        raise UsageError("the model is on the meta device and was not made by spillway.load: there are no weights")


def assemble(
    model: nn.Module,
    form: StateFormat,
    place: Place,
    request: PlanRequest,
    micro_batch: int | None,
    resume: bool | str | os.PathLike[str] = False,
    label_smoothing: float = 0.0,
) -> Prepared:
    """Replace the model's forwards by streaming ones. Nothing is loaded before the first batch, or `Session.open`.
    Raises UsageError and DiskError."""
    paths, compute, origin = store_paths(place.store), open_device(place.device), origins.get(model)
    units = find_units(model, form)
    if any(module._compiled_call_impl is not None for unit in units for _, module in unit.members):
        request = replace(request, tapes=False)
    space_of(request)
    in_memory = {name: param.data for name, param in model.named_parameters()} if origin is None else {}
    source: WeightSource = (
        ModuleSource(in_memory) if origin is None else open_source(origin.directory, model, origin.allow_pickle)
    )
    points = SavedPoints(
        paths[0] if paths else None, units, request.keep.last, buffers=lambda: persistent_buffers(model)
    )
    geometry = place_store(points, paths, resume)
    budget = make_budget(
        compute, geometry, place.device_memory, place.host_memory, place.disk_memory, _host_bytes(in_memory)
    )
    layouts = [unit.layout for unit in units]
    request = replace(request, goes_on=bool(points.found))
    store = PlacedStore(layouts, geometry, budget, compute.allocate, compute.pin, points.found)
    planner = Planner(compute, units, paths, budget, request, form)
    cores = psutil.cpu_count(logical=True) or 1
    threads = cores if compute.kind == "cpu" else max(cores - 2, 1)  # a GPU wants to be fed
    session = Session(model, units, compute, planner, store, request.accumulation, micro_batch, threads)
    _move_buffers(model, compute)
    parts = Prepared(
        session,
        points,
        budget,
        planner,
        origin.directory if origin else None,
        sum(layout.weight_bytes for layout in layouts),
        sum(layout.extent_bytes for layout in layouts),
        source.unexpected if isinstance(source, DirectorySource) else [],
        source.written_as if isinstance(source, DirectorySource) else {},
        in_memory,
    )
    session.engine.on_rest = lambda: points.at_rest(store)
    store.on_open = lambda opened, plan: _fill(opened, plan, parts, source)
    _prepared[model] = parts
    session.on_undo.append(guard(model))
    try:
        _adapt(model, session, label_smoothing)
    except BaseException:
        give_back(model)
        raise
    return parts


def _fill(opened: PlacedStore, plan: Plan, parts: Prepared, source: WeightSource) -> None:
    """Put the store's first content to rest: the saved point that is gone on from, or the weights of the source."""
    parts.points.keep_last = plan.placement.keep.last
    if parts.points.found:
        parts.points.restore(opened, parts.on_load)
        if parts.optimizer is not None:
            parts.optimizer.restore(parts.points.step, parts.points.found_run)
    else:
        load_weights(opened, parts.session.units, source, parts.on_load)
        if parts.optimizer is not None:
            parts.points.begin(opened)


def give_back(model: nn.Module) -> None:
    """The model as it was, where nothing was loaded yet: it may be prepared again, with other budgets."""
    parts = prepared(model)
    session, in_memory = parts.session, parts.in_memory
    session.engine.close()
    names = session.placeholders
    if not in_memory or len(in_memory) == len(names):
        flags = {place.name: place.trainable for unit in session.units for place in unit.layout.places}
        tensors = in_memory or {name: param.detach() for name, param in names.items()}
        session.undo({name: nn.Parameter(tensor, flags[name]) for name, tensor in tensors.items()})
        _prepared.pop(model, None)


def model_profiler(
    model: nn.Module, form: StateFormat, batch: Mapping[str, Any], micro_batch: int | None
) -> ModelProfile:
    """What the planner needs to know of a model on the meta device, from one forward on fake tensors in the place of
    this batch (keyword arguments). The model serves for nothing else afterwards."""
    units = find_units(model, form)
    nothing = Budget(0, 0, 0, 0)
    placed = PlacedStore(
        [unit.layout for unit in units], None, nothing, lambda size: torch.empty(0), lambda _: _nothing, ()
    )
    found: list[ModelProfile] = []

    def note(profile: ModelProfile, is_open: bool) -> Plan:
        found.append(profile)
        return Plan(Placement((), (), "serial", False, 1, 1, 1, 1), (), ())

    session = Session(model, units, open_device("cpu"), note, placed, 1, micro_batch, 1)
    _adapt(model, session)
    session.profile((), dict(batch))
    session.engine.close()
    return found[0]


def _nothing() -> None:
    """Nothing was pinned."""


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong into a checkpoint, by name."""
    state = nn.Module.state_dict(model, keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {found[0]: tuple(found) for found in names.values()}


def open_source(directory: Path, model: nn.Module, allow_pickle: bool) -> DirectorySource:
    """The weight files of a model directory, for that model. Raises UsageError where they do not fit it."""
    if not _is_transformers(model):
        return DirectorySource(directory, model, _aliases(model), allow_pickle)
    from spillway.integrations.huggingface import joined_weights

    return DirectorySource(directory, model, _aliases(model), allow_pickle, lambda keys: joined_weights(model, keys))


def _is_transformers(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def _host_bytes(params: dict[str, torch.Tensor]) -> int:
    return sum(param.numel() * param.element_size() for param in params.values() if param.device.type == "cpu")


def _move_buffers(model: nn.Module, device: Device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch_device)


def _adapt(model: nn.Module, session: Session, label_smoothing: float = 0.0) -> None:
    """Only a transformers model needs transformers. Raises UsageError where the loss is not theirs to smooth."""
    if _is_transformers(model):
        from spillway.integrations.huggingface import adapt

        adapt(model, session, label_smoothing)
    elif label_smoothing:
        raise UsageError(f"label smoothing is not for {type(model).__name__}: its loss is its own")
