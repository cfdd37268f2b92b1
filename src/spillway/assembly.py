"""A model and all that makes it stream, put together: for training and for forwards alone."""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import nn

from spillway.checkpoint.load import load_weights
from spillway.checkpoint.place import place_store, store_paths
from spillway.checkpoint.points import SavedPoints
from spillway.checkpoint.sources import persistent_buffers
from spillway.model.guards import guard
from spillway.model.units import find_units, is_compiled
from spillway.optim.optimizer import StreamingOptimizer
from spillway.origins import Origins, comes_from
from spillway.plan.request import PlanRequest, space_of
from spillway.planner import Planner, make_budget
from spillway.report.progress import Reporter
from spillway.runtime.device import Device, open_device
from spillway.runtime.room import finding_room
from spillway.runtime.session import Session
from spillway.runtime.unit import is_streamed
from spillway.spec.errors import UsageError
from spillway.spec.hardware import Budget
from spillway.spec.plan import Plan
from spillway.spec.state import StateFormat
from spillway.store.placed import PlacedStore


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
    origins: Origins
    reporter: Reporter  # shows how far loading has come
    optimizer: StreamingOptimizer | None = None  # None where it is not trained

    @property
    def weight_bytes(self) -> int:
        """Of all units, as loaded and as written for others."""
        return sum(unit.layout.weight_bytes for unit in self.session.units)

    @property
    def extent_bytes(self) -> int:
        """Of all units, as saved."""
        return sum(unit.layout.extent_bytes for unit in self.session.units)


# What belongs to a model holds the model: an entry goes when the model is closed, not by itself.
_prepared: "weakref.WeakKeyDictionary[nn.Module, Prepared]" = weakref.WeakKeyDictionary()
_closed: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def prepared(model: nn.Module) -> Prepared:
    """What belongs to a model that went through `prepare` or `stream`. Raises UsageError for any other."""
    found = _prepared.get(model)
    if model in _closed:
        raise UsageError("the model was closed: load it again, with resume=True to go on from its saved point")
    if found is None:
        raise UsageError("this model did not go through spillway.prepare")
    return found


def is_closed(model: nn.Module) -> bool:
    """Whether it was prepared and closed again."""
    return model in _closed


def forget(model: nn.Module) -> None:
    """It was closed: what belonged to it may go."""
    _prepared.pop(model, None)
    _closed.add(model)


def check_fresh(model: nn.Module) -> None:
    """Raise UsageError for a model that streams already, or that is compiled whole."""
    wrapped = any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules())
    if wrapped or model._compiled_call_impl is not None:
        raise UsageError(
            "torch.compile on a whole model leaves no blocks to stream, and as a function it renames their parameters: "
            "compile the blocks in place instead, as in `for block in model.model.layers: block.compile()`"
        )
    for name, param in model.named_parameters():
        if param._backward_hooks:
            raise UsageError(
                f"{name} has a hook on its gradient, which would not be called: gradients of a model that streams are "
                f"summed unit by unit; freeze a part of it instead, or scale the loss"
            )
    streaming = (name or type(model).__name__ for name, module in model.named_modules() if is_streamed(module))
    part = next(streaming, None)
    if part is not None and model not in _prepared and model not in _closed:
        raise UsageError(
            f"{part} streams already, as a part of another model that was prepared: prepare one module that holds "
            f"both, or build the part anew"
        )
    if model in _prepared or model in _closed:
        raise UsageError("this model was prepared before, and its weights are in the store: build or load it anew")


def assemble(
    model: nn.Module,
    form: StateFormat,
    place: Place,
    request: PlanRequest,
    micro_batch: int | None,
    resume: bool | str | os.PathLike[str] = False,
    label_smoothing: float = 0.0,
    progress: bool = True,
) -> Prepared:
    """Replace the model's forwards by streaming ones. Nothing is loaded before the first batch, or `Session.open`.
    `progress`: bars on a terminal for what takes long. Raises UsageError and DiskError."""
    reporter = Reporter(quiet=not progress)
    paths, compute = store_paths(place.store), open_device(place.device)
    units = find_units(model, form)
    if any(map(is_compiled, units)):
        request = replace(request, tapes=False)
    space_of(request)
    origins = Origins(model, _copies(model))
    points = SavedPoints(
        paths[0] if paths else None,
        units,
        compute.torch_device,
        request.keep.last,
        buffers=lambda: persistent_buffers(model),
    )
    geometry = place_store(points, paths, resume, reporter.counting)
    budget = make_budget(
        compute, geometry, place.device_memory, place.host_memory, place.disk_memory, origins.host_bytes
    )
    layouts = [unit.layout for unit in units]
    request = replace(request, goes_on=bool(points.found) and not points.found[0].in_place)
    store = PlacedStore(layouts, geometry, budget, compute.allocate, compute.pin, points.found)
    planner = Planner(compute, units, geometry, budget, request, form)
    cores = psutil.cpu_count(logical=True) or 1
    threads = cores if compute.kind == "cpu" else max(cores - 2, 1)  # a GPU wants to be fed
    buffers_back = _move_buffers(model, compute)
    session = Session(model, units, compute, planner, store, request.accumulation, micro_batch, threads)
    parts = Prepared(
        session,
        points,
        budget,
        planner,
        origins,
        reporter,
    )
    session.engine.on_rest = lambda: points.at_rest(store)
    session.on_begin = points.begin_step
    store.on_open = lambda opened, plan: _fill(opened, plan, parts)
    _prepared[model] = parts
    try:
        session.on_undo += [buffers_back, guard(model, session.drop_gradients)]
        adapt_parts(model, session, label_smoothing)
    except BaseException:
        give_back(model)
        raise
    return parts


def _fill(opened: PlacedStore, plan: Plan, parts: Prepared) -> None:
    """Put the store's first content to rest: the saved point that is gone on from, or the weights of the model, whose
    files are closed then."""
    parts.points.keep_last = plan.placement.keep.last
    opened.homes.before_overwrite = lambda: parts.points.before_overwrite(opened)
    if parts.points.found:
        with parts.reporter.counting("checking the saved point", parts.extent_bytes) as counter:
            parts.points.restore(opened, counter.advance)
        if parts.optimizer is not None:
            parts.optimizer.restore(parts.points.step, parts.points.found_run)
    else:
        with parts.reporter.counting("loading weights", parts.weight_bytes) as counter:
            load_weights(opened, parts.session.units, parts.origins.weights, counter.advance)
        if parts.optimizer is not None:
            parts.points.begin(opened)
    parts.origins.weights.close()


def write_point(parts: Prepared, step: int) -> None:
    """Make the end of this step, which is at rest, a saved point. Raises DiskError."""
    points, store = parts.points, parts.session.store
    points.settle(store)  # one that is being written in the background may be of this step
    left = points.num_unwritten_bytes(store, step)
    if not left:
        points.save(store, step)
        return
    with parts.reporter.counting("writing the saved point", left) as counter:
        points.save(store, step, counter.advance)


def give_back(model: nn.Module) -> None:
    """The model as it was, where nothing was loaded yet: it may be prepared again, with other budgets."""
    parts = prepared(model)
    parts.session.engine.close()
    if parts.origins.is_whole:
        parts.session.undo(parts.origins.originals)
        _prepared.pop(model, None)


def _move_buffers(model: nn.Module, device: Device) -> Callable[[], None]:
    """Put them where units compute. What is returned puts them back, as does a failure: the model is the user's until
    it streams."""
    own = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.device != device.torch_device
    ]

    def back() -> None:
        for buffers, name, buffer in own:
            buffers[name] = buffer

    try:
        with finding_room("the buffers of the model"):
            for buffers, name, buffer in own:
                buffers[name] = buffer.to(device.torch_device)
    except BaseException:
        back()
        raise
    return back


def _copies(model: nn.Module) -> dict[int, nn.Parameter]:
    if not comes_from("peft", model):
        return {}
    from spillway.integrations.peft import copied_parameters

    return copied_parameters(model)


def adapt_parts(model: nn.Module, session: Session, label_smoothing: float = 0.0) -> None:
    """The transformers models in it, which is all that needs transformers. Raises UsageError where the loss is not
    theirs to smooth."""
    parts = list(_library_models(model))
    for part in parts:
        inner: Any = part
        if comes_from("peft", part):
            from spillway.integrations.peft import refuse_merging

            refuse_merging(part, session)
            inner = inner.get_base_model()
        if comes_from("transformers", inner):
            from spillway.integrations.huggingface import adapt

            adapt(inner, part, session, label_smoothing if part is model else 0.0)
    if label_smoothing and model not in parts:
        raise UsageError(f"label smoothing is not for {type(model).__name__}: its loss is its own")


def _library_models(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that come from transformers or peft."""
    if comes_from("peft", module) or comes_from("transformers", module):
        yield module
        return
    for child in module.children():
        yield from _library_models(child)
