"""The Python API: load, prepare, save."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from spillway.checkpoint.load import StoreBytes, load_weights, read_parameter
from spillway.checkpoint.place import place_store, store_paths
from spillway.checkpoint.points import SavedPoints
from spillway.checkpoint.save import MAX_SHARD_BYTES, WrittenAs, save_weights
from spillway.checkpoint.sources import DirectorySource, ModuleSource, WeightSource
from spillway.model.units import Unit, find_units
from spillway.optim.config import SGD, AdamW, Lion, Rule, state_format
from spillway.optim.optimizer import StreamingOptimizer
from spillway.plan.request import PlanRequest, space_of
from spillway.planner import Planner, make_budget
from spillway.runtime.device import Device, open_device
from spillway.runtime.session import Session
from spillway.spec.errors import UsageError
from spillway.spec.hardware import Budget
from spillway.spec.model import ModelProfile
from spillway.spec.plan import LAST_POINT, KeepPoints, Placement, Plan
from spillway.spec.state import StateFormat
from spillway.store.placed import PlacedStore

_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class _Origin:
    """The directory a model on the meta device was loaded from."""

    directory: Path
    allow_pickle: bool


_origins: "weakref.WeakKeyDictionary[nn.Module, _Origin]" = weakref.WeakKeyDictionary()
_sessions: "weakref.WeakKeyDictionary[nn.Module, Prepared]" = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class Prepared:
    """What belongs to a prepared model."""

    session: Session
    optimizer: StreamingOptimizer
    points: SavedPoints
    budget: Budget
    planner: Planner
    origin: Path | None
    weight_bytes: int  # of all units, as loaded
    extent_bytes: int  # of all units, as saved
    unexpected: list[str]  # tensors of the model directory that the model has no use for
    written_as: WrittenAs  # parameters that its checkpoint has in another form
    on_load: Callable[[int], None] | None = None  # told of the bytes of each window while weights are loaded


def load(
    directory: str | os.PathLike[str],
    auto_class: Any,
    dtype: str | torch.dtype = "bfloat16",
    *,
    allow_pickle: bool = False,
    num_layers: int | None = None,
) -> nn.Module:
    """A Hugging Face model without its weights, which `prepare` streams into the store shard by shard.

    `auto_class`: a transformers class such as AutoModelForCausalLM. `dtype` is the one it computes in; bfloat16
    keeps an fp32 master. `allow_pickle`: also take .bin weights, where there are no safetensors. `num_layers`: only
    the first blocks. Raises UsageError for a directory that is no model.
    """
    from spillway.integrations.huggingface import build_on_meta, find_directory

    path = find_directory(os.fspath(directory), allow_pickle)
    model = build_on_meta(path, auto_class, as_dtype(dtype), num_layers)
    _origins[model] = _Origin(path, allow_pickle)
    return model


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name. Raises UsageError for one that cannot be trained in."""
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype)
    if found not in (torch.bfloat16, torch.float32):
        raise UsageError(f"dtype {dtype} cannot be trained in: choose bfloat16 or float32")
    return found


def prepare(
    model: nn.Module,
    optimizer: Rule | None = None,
    *,
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    device: str = "auto",
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk_memory: str | int | None = None,
    micro_batch: int | None = None,
    gradient_accumulation_steps: int = 1,
    update: str = "auto",
    activations: str = "auto",
    weights: str = "auto",
    states: str = "auto",
    policy: str = "auto",
    example: Mapping[str, Any] | None = None,
    resume: bool | str | os.PathLike[str] = False,
    keep: KeepPoints = LAST_POINT,
) -> tuple[nn.Module, StreamingOptimizer]:
    """Let `model` train within the given memory; the loop around it stays as it is.

    `model`: from `load`, or any nn.Module in memory (its parameters then move into the store). `store`: one or more
    directories on fast drives; without any, everything rests in host memory. Memory sizes as people write them
    ("24GB"); by default what is free. `micro_batch`: rows computed at a time inside each unit. `update`: "auto",
    "serial", "overlap" or "deferred". `activations`: "auto", "recompute", "tape" (outputs of matrix products and
    attention are kept where they fit), or where all that autograd saves is kept as far as it fits: "keep" (on the
    device), "host" or "disk". `weights`, `states`: "auto", "device", "host" or "disk". `policy`: "auto", or the planner
    of another system that makes the plan (see `spillway.plan.policies`). `example`: keyword arguments of the longest
    batch to come; with it everything is planned and checked now, otherwise at the first forward. `resume`: go on from
    the last saved point in `store`, or in the directory given; budgets, device and drives may differ from those of the
    run that saved it. `keep`: how many saved points stay, and whether they are also made where states rest in memory.

    Returns the same model, and the optimizer. Raises PlanInfeasible, DiskError or UsageError, each in one sentence.
    """
    settings = AdamW() if optimizer is None else optimizer
    _check(model, settings, micro_batch, gradient_accumulation_steps)
    paths, compute, origin = store_paths(store), open_device(device), _origins.get(model)
    form = state_format(settings)
    units = find_units(model, form)
    in_memory = {name: param.data for name, param in model.named_parameters()} if origin is None else {}
    source: WeightSource = (
        ModuleSource(in_memory) if origin is None else open_source(origin.directory, model, origin.allow_pickle)
    )
    points = SavedPoints(paths[0] if paths else None, units, keep.last, buffers=lambda: persistent_buffers(model))
    geometry = place_store(points, paths, resume)
    budget = make_budget(compute, geometry, device_memory, host_memory, disk_memory, _host_bytes(in_memory))
    layouts, clip = [unit.layout for unit in units], settings.max_grad_norm is not None
    placed = PlacedStore(layouts, geometry, budget, compute.allocate, compute.pin, points.found, keep)
    request = PlanRequest(
        update, weights, states, clip, gradient_accumulation_steps, bool(paths), keep, activations, policy
    )
    space_of(request)
    planner = Planner(compute, units, paths, budget, request, form)
    threads = psutil.cpu_count(logical=True) or 1
    session = Session(model, units, compute, planner, placed, gradient_accumulation_steps, micro_batch, threads)
    _move_buffers(model, compute)
    streaming = StreamingOptimizer(settings, session.placeholders, lambda: _finish(model), points.step)
    session.hypers, session.max_grad_norm = streaming.hypers, settings.max_grad_norm
    session.segments = [_segments(unit, session, streaming) for unit in units]
    parts = Prepared(
        session,
        streaming,
        points,
        budget,
        planner,
        origin.directory if origin else None,
        sum(layout.weight_bytes for layout in layouts),
        sum(layout.extent_bytes for layout in layouts),
        source.unexpected if isinstance(source, DirectorySource) else [],
        source.written_as if isinstance(source, DirectorySource) else {},
    )
    session.on_rest = lambda: points.at_rest(placed)
    placed.on_open = lambda opened: _fill(opened, parts, source)
    _sessions[model] = parts
    _adapt(model, session)
    if example is not None:
        try:
            session.open((), dict(example))
        except BaseException:
            _give_back(model, session, in_memory)
            raise
    return model, streaming


def _check(model: nn.Module, settings: Rule, micro_batch: int | None, accumulation: int) -> None:
    """Raise UsageError for what cannot be prepared."""
    if not isinstance(settings, (AdamW, Lion, SGD)):
        raise UsageError(
            f"the optimizer is a {type(settings).__name__}: give spillway.AdamW(...), spillway.Lion(...) or "
            f"spillway.SGD(...), whose states can rest outside the device"
        )
    for name, count in (("micro_batch", micro_batch), ("gradient_accumulation_steps", accumulation)):
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}")
    if model in _sessions:
        raise UsageError("this model was prepared before: build or load it anew")
    if model not in _origins and any(param.is_meta for param in model.parameters()):
        raise UsageError("the model is on the meta device and was not made by spillway.load: there are no weights")


def _fill(opened: PlacedStore, parts: Prepared, source: WeightSource) -> None:
    """Put the store's first content to rest: the saved point that is gone on from, or the weights of the source."""
    if parts.points.found:
        parts.points.restore(opened, parts.on_load)
        parts.optimizer.num_steps = parts.points.step
    else:
        load_weights(opened, parts.session.units, source, parts.on_load)
        parts.points.begin(opened)


def _give_back(model: nn.Module, session: Session, in_memory: dict[str, torch.Tensor]) -> None:
    """The model as it was, where nothing was loaded yet: it may be prepared again, with other budgets."""
    session.close()
    names = session.placeholders
    if not in_memory or len(in_memory) == len(names):
        flags = {place.name: place.trainable for unit in session.units for place in unit.layout.places}
        tensors = in_memory or {name: param.detach() for name, param in names.items()}
        session.undo({name: nn.Parameter(tensor, flags[name]) for name, tensor in tensors.items()})
        _sessions.pop(model, None)


def model_profiler(
    model: nn.Module, form: StateFormat, rows: int, length: int, micro_batch: int | None
) -> ModelProfile:
    """What the planner needs to know of a language model on the meta device, from one forward on fake tensors of
    [rows, length] tokens. The model serves for nothing else afterwards."""
    units = find_units(model, form)
    nothing = Budget(0, 0, 0, 0)
    placed = PlacedStore(
        [unit.layout for unit in units], None, nothing, lambda size: torch.empty(0), lambda _: _nothing, (), LAST_POINT
    )
    found: list[ModelProfile] = []

    def note(profile: ModelProfile, is_open: bool) -> Plan:
        found.append(profile)
        return Plan(Placement((), (), "serial", False, 1, 1, 1, 1), (), ())

    session = Session(model, units, open_device("cpu"), note, placed, 1, micro_batch, 1)
    _adapt(model, session)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    session.profile((), {"input_ids": ids, "labels": ids})
    session.close()
    return found[0]


def _nothing() -> None:
    """Nothing was pinned."""


def prepared(model: nn.Module) -> Prepared:
    """What belongs to a model that went through `prepare`. Raises UsageError for any other."""
    found = _sessions.get(model)
    if found is None:
        raise UsageError("this model did not go through spillway.prepare")
    return found


def save_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:
    """Write a directory that `from_pretrained` loads: sharded safetensors, config, tokenizer of the source. Streams;
    needs host memory for one window, not for the model. Returns the directory."""
    parts = prepared(model)
    session, path = parts.session, Path(directory)
    session.come_to_rest()
    _refuse_unfinished(session)
    if not session.is_open:
        session.open()
    save_weights(
        StoreBytes(session.store),
        session.units,
        persistent_buffers(model),
        path,
        max_shard_bytes,
        written_as=parts.written_as,
    )
    from spillway.integrations.huggingface import save_config

    save_config(model, path, parts.origin)
    return path


def _refuse_unfinished(session: Session) -> None:
    if not session.is_intact:
        raise UsageError("a step failed after it had changed weights in memory: resume from the last saved point")
    if session.awaits_step:
        raise UsageError("backward has run and the step is not finished: call optimizer.step() first")


def save_point(model: nn.Module) -> int:
    """Make the last finished step a saved point that `prepare(..., resume=True)` goes on from, wherever states rest.
    (Where all of them rest on disk every step is one by itself.) Returns the step. Raises UsageError without a store,
    DiskError when it cannot be written; the point before it is intact then."""
    parts = prepared(model)
    if parts.points.directory is None:
        raise UsageError("there is no store to save to: pass store= to prepare")
    if not parts.session.is_open:  # or closed, which this says
        raise UsageError("nothing was trained yet: there is no step to save")
    parts.session.come_to_rest()
    _refuse_unfinished(parts.session)
    if parts.optimizer.num_steps == 0:
        raise UsageError("nothing was trained yet: there is no step to save")
    parts.points.save(parts.session.store, parts.optimizer.num_steps)
    return parts.optimizer.num_steps


def close(model: nn.Module) -> None:
    """Release memory, files and locks of a prepared model; saved points stay."""
    parts = prepared(model)
    try:
        if parts.session.is_running:
            if parts.session.awaits_step:
                parts.session.settle()
            else:
                parts.session.come_to_rest()
            parts.points.settle(parts.session.store)
    finally:
        parts.session.close()


def read_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter as it is at rest, whole, on the CPU: for small models and for tests."""
    session = prepared(model).session
    session.come_to_rest()
    if not session.is_intact:
        raise UsageError("a step failed after it had changed weights in memory: resume from the last saved point")
    if not session.is_open:
        session.open()
    return {
        place.name: read_parameter(StoreBytes(session.store), index, place, unit.layout)
        for index, unit in enumerate(session.units)
        for place in unit.layout.places
    }


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong into a checkpoint, by name."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}


def _finish(model: nn.Module) -> Any:
    parts = prepared(model)
    result = parts.session.finish()
    parts.optimizer.num_steps += 1
    if parts.session.is_due:
        parts.points.note_step(parts.session.store, parts.optimizer.num_steps)
    else:
        parts.points.after_step(parts.session.store, parts.optimizer.num_steps)
    return result


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


def _segments(unit: Unit, session: Session, optimizer: StreamingOptimizer) -> list[tuple[int, int, int]]:
    """Element ranges of the unit's trainable part with their parameter group; neighbours of one group are joined."""
    groups = optimizer.group_of()
    trained = [place for place in unit.layout.places if place.trainable]
    segments: list[tuple[int, int, int]] = []
    for index, place in enumerate(trained):
        stop = trained[index + 1].start if index + 1 < len(trained) else unit.layout.num_trainable
        group = groups[id(session.placeholders[place.name])]
        if segments and segments[-1][2] == group:
            segments[-1] = (segments[-1][0], stop, group)
        else:
            segments.append((place.start, stop, group))
    return segments


def _move_buffers(model: nn.Module, device: Device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch_device)


def _adapt(model: nn.Module, session: Session) -> None:
    """Only a transformers model needs transformers."""
    if _is_transformers(model):
        from spillway.integrations.huggingface import adapt

        adapt(model, session)
