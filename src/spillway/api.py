"""The Python API: load, prepare, save."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from spillway.assembly import Place, assemble, check_fresh, forget, give_back, is_closed, prepared, write_point
from spillway.checkpoint.load import StoreBytes, read_parameter
from spillway.checkpoint.save import MAX_SHARD_BYTES, save_weights, weights_bytes
from spillway.checkpoint.sources import persistent_buffers
from spillway.model.units import Unit
from spillway.optim.clip import LossScale
from spillway.optim.config import SGD, AdamW, Lion, Rule, state_format
from spillway.optim.groups import named_groups
from spillway.optim.optimizer import StreamingOptimizer
from spillway.origins import comes_from, note_origin
from spillway.plan.request import PlanRequest
from spillway.report.progress import Reporter
from spillway.runtime.interrupts import uninterrupted
from spillway.runtime.session import Session
from spillway.spec.errors import UsageError
from spillway.spec.plan import LAST_POINT, KeepPoints
from spillway.spec.state import EXACT
from spillway.spec.trace import StepResult

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


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
    note_origin(model, path, allow_pickle)
    return model


def add_adapter(model: nn.Module, adapter: Any) -> Any:
    """A peft.PeftModel: the model, frozen, with LoRA adapters to train. `model`: from `load`, or in memory. `adapter`:
    a peft.LoraConfig, or the directory of a saved adapter to train further. `prepare` takes the result;
    `save_pretrained` writes the adapter alone. Raises UsageError for adapters that need the weights of the base to
    start, or do not fit it."""
    try:
        from spillway.integrations.peft import attach
    except ModuleNotFoundError as error:
        raise UsageError("adapters need peft: pip install peft") from error
    return attach(model, Path(adapter) if isinstance(adapter, (str, os.PathLike)) else adapter)


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name. Raises UsageError for another than those of models here."""
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype)
    if found is None or found not in _DTYPES.values():
        raise UsageError(f"there is no dtype {dtype} here: choose bfloat16, float16 or float32")
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
    streams: int | None = None,
    label_smoothing: float = 0.0,
    param_groups: Iterable[Mapping[str, Any]] = (),
    example: Mapping[str, Any] | None = None,
    resume: bool | str | os.PathLike[str] = False,
    keep: KeepPoints = LAST_POINT,
    progress: bool = True,
) -> tuple[nn.Module, StreamingOptimizer]:
    """Let `model` train within the given memory; the loop around it stays as it is.

    `model`: from `load`, or any nn.Module in memory (its parameters then move into the store; build it on the CPU, for
    what it takes of the GPU by then counts as taken). `store`: one or more
    directories on fast drives; without any, everything rests in host memory. Memory sizes as people write them
    ("24GB"); by default what is free. `micro_batch`: rows computed at a time inside each unit. `update`: "auto",
    "serial", "overlap-naive", "overlap" or "deferred". `activations`: "auto", "recompute", "tape" (outputs of matrix
    products and attention are kept where they fit), or where all that autograd saves is kept as far as it fits: "keep"
    (on the device), "host" or "disk". `weights`, `states`: "auto", "device", "host" or "disk". `policy`: "auto", or the
    planner of another system that makes the plan (see `spillway.plan.policies`). `streams`: how many micro-batches a
    GPU computes side by side; by default as many as its memory leaves room for. `label_smoothing`: of the loss of a
    transformers model. `param_groups`: as torch.optim takes them ({"params": [...], "lr": 1e-5}), of parameters that
    are not to be trained with the optimizer's own settings; all others are, in groups after these. `example`: keyword
    arguments of the longest batch to come; with it everything is planned and checked now, otherwise at the first
    forward. `resume`: go on from the last saved point in `store`, or in the directory given; budgets, device and drives
    may differ from those of the run that saved it. `num_steps` of the optimizer then tells how many steps lie behind;
    the learning rate is the one given here, so let a scheduler go on from there. Where `store` holds no saved point
    training starts anew, with a NothingSaved warning. `keep`: how many saved points stay, and whether they are also
    made where states rest in memory. `progress`: bars on a terminal while weights are loaded, a saved point is checked,
    or the store moves to other drives.

    Returns the same model, and the optimizer. Raises PlanInfeasible, DiskError or UsageError, each in one sentence.
    """
    settings = AdamW() if optimizer is None else optimizer
    _check(model, settings)
    counts = {
        "micro_batch": micro_batch,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "streams": streams,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}")
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing must be in [0, 1), not {label_smoothing}")
    own_groups = named_groups(model, param_groups, settings)
    is_half = any(param.dtype is torch.float16 for param in model.parameters() if param.requires_grad)
    loss_scale = LossScale.of(settings.loss_scale, is_half)
    request = PlanRequest(
        update=update,
        weights=weights,
        states=states,
        clip=settings.waits_for_norm(is_half),
        accumulation=gradient_accumulation_steps,
        has_store=bool(store),
        keep=keep,
        activations=activations,
        policy=policy,
        streams=streams,
    )
    place = Place(store, device, device_memory, host_memory, disk_memory)
    parts = assemble(model, state_format(settings), place, request, micro_batch, resume, label_smoothing, progress)
    session = parts.session
    streaming = StreamingOptimizer(
        settings,
        session.placeholders,
        loss_scale,
        lambda: _finish(model, streaming),
        session.drop_gradients,
        parts.points.step,
        own_groups,
    )
    segments = [_segments(unit, session, streaming) for unit in session.units]
    session.train_by(streaming.hypers, segments, settings.clipping, loss_scale)
    parts.optimizer, parts.points.at_step = streaming, streaming.saved
    if example is not None:
        _open(model, example)
    return model, streaming


def stream(
    model: nn.Module,
    *,
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    device: str = "auto",
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    disk_memory: str | int | None = None,
    weights: str = "auto",
    example: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Let `model` compute forwards within the given memory, without training it: a teacher, a judge, generation.

    Its parameters are frozen and come to rest now, in host memory as far as they fit and in `store` (see `prepare`
    for the arguments); forwards under torch.no_grad() then stream them, the next units while one computes. `example`:
    keyword arguments of a forward, for models that use weights outside of the modules that hold them. Returns the same
    model. Raises PlanInfeasible, DiskError or UsageError, each in one sentence.
    """
    check_fresh(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    model.requires_grad_(False)
    request = PlanRequest(weights=weights, has_store=bool(store))
    try:
        place = Place(store, device, device_memory, host_memory, disk_memory)
        forwards = assemble(model, EXACT, place, request, None, progress=progress).session.forwards
        if example is not None:
            with _given_back_on_failure(model):
                forwards.find_residents(forwards.batch((), dict(example)))
        _open(model, {})
    except BaseException:
        for param in trained:
            param.requires_grad_()
        raise
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards of forwards inside only add to the gradients; the first one outside completes the optimizer step,
    however many there were. As in DistributedDataParallel; needs gradient_accumulation_steps= of 2 or more in
    `prepare`, whose number then does not count."""
    with prepared(model).session.rounds.saying(completes=False):
        yield


def _open(model: nn.Module, example: Mapping[str, Any]) -> None:
    with _given_back_on_failure(model):
        if example and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(dict(example))):
            raise UsageError("example= has no tensor in it: give keyword arguments of one forward, as a batch has them")
        prepared(model).session.open((), dict(example))


@contextmanager
def _given_back_on_failure(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        give_back(model)
        raise


def _check(model: nn.Module, settings: Rule) -> None:
    """Raise UsageError for what cannot be prepared."""
    if not isinstance(settings, (AdamW, Lion, SGD)):
        raise UsageError(
            f"the optimizer is a {type(settings).__name__}: give spillway.AdamW(...), spillway.Lion(...) or "
            f"spillway.SGD(...), whose states can rest outside the device"
        )
    check_fresh(model)
    dtypes = {param.dtype for param in model.parameters() if param.requires_grad}
    if settings.master_bits != 32 and dtypes - {torch.bfloat16}:
        raise UsageError(f"master_bits={settings.master_bits} is for bfloat16 weights: train in that, or leave it out")
    if not dtypes:
        raise UsageError(
            "no parameter requires a gradient: there is nothing to train (spillway.stream is for forwards alone)"
        )


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> Path:
    """Write a directory that `from_pretrained` loads: sharded safetensors, config, tokenizer of the source. Streams;
    needs host memory for one window, not for the model. Of a model with adapters of peft, the adapters alone, for
    `peft.PeftModel.from_pretrained`. `progress`: a bar on a terminal. Returns the directory. Raises UsageError for that
    of the source, DiskError where there is no room."""
    parts = prepared(model)
    session, path = parts.session, Path(directory)
    directories = parts.origins.directories
    if any(source.resolve() == path.resolve() for source in directories):
        raise UsageError(f"{path} is the directory the model was loaded from: choose another")
    session.come_to_rest()
    _refuse_unfinished(session)
    if not session.engine.is_open:
        session.open()
    if comes_from("peft", model):
        from spillway.integrations.peft import adapter_parameters, save_adapters

        save_adapters(model, _read(session, set(adapter_parameters(model))), path)
        return path
    with Reporter(quiet=not progress).counting(f"writing {path}", weights_bytes(session.units)) as counter:
        save_weights(
            StoreBytes(session.store),
            session.units,
            persistent_buffers(model),
            path,
            max_shard_bytes,
            progress=counter.advance,
            written_as=parts.origins.written_as,
        )
    from spillway.integrations.huggingface import save_config

    save_config(model, path, directories[0] if directories else None)
    return path


def _refuse_unfinished(session: Session) -> None:
    session.rest.refuse_half_done()
    if session.awaits_step:
        raise UsageError("backward has run and the step is not finished: call optimizer.step() first")


def save_point(model: nn.Module) -> int:
    """Make the last finished step a saved point that `prepare(..., resume=True)` goes on from, wherever states rest.
    (Where all of them rest on disk every step is one by itself.) Where steps are made in place it lasts until the next
    step: save one before the model is closed. Returns the step. Raises UsageError without a store, DiskError when it
    cannot be written; the point before it, if it stays, is intact then."""
    parts = prepared(model)
    if parts.points.directory is None:
        raise UsageError("there is no store to save to: pass store= to prepare")
    if not parts.session.engine.is_open:  # or closed, which this says
        raise UsageError("nothing was trained yet: there is no step to save")
    if not parts.points.can_save(parts.session.store):
        raise UsageError(
            "this run saves no points: its drives have no room for what rests in memory (or keep= says so); "
            "save_pretrained writes the model"
        )
    parts.session.come_to_rest()
    _refuse_unfinished(parts.session)
    steps = 0 if parts.optimizer is None else parts.optimizer.num_steps
    if steps == 0:
        raise UsageError("nothing was trained yet: there is no step to save")
    write_point(parts, steps)
    return steps


def close(model: nn.Module) -> None:
    """Release memory, files and locks of a prepared model; saved points stay. It may be closed twice."""
    if is_closed(model):
        return
    parts = prepared(model)
    try:
        if parts.session.engine.is_running:
            if parts.session.awaits_step:
                parts.session.settle()
            else:
                parts.session.come_to_rest()
            parts.points.settle(parts.session.store)
    finally:
        try:
            parts.points.stop()
        finally:
            try:
                parts.session.engine.close()
            finally:
                forget(model)


def read_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter as it is at rest, whole, on the CPU: for small models and for tests."""
    session = prepared(model).session
    session.come_to_rest()
    session.rest.refuse_half_done()
    if not session.engine.is_open:
        session.open()
    return _read(session, set(session.placeholders))


def _read(session: Session, names: set[str]) -> dict[str, torch.Tensor]:
    return {
        place.name: read_parameter(StoreBytes(session.store), index, place, unit.layout)
        for index, unit in enumerate(session.units)
        for place in unit.layout.places
        if place.name in names
    }


def _finish(model: nn.Module, optimizer: StreamingOptimizer) -> StepResult:
    parts = prepared(model)
    with uninterrupted():  # a step counts where it was made
        result = parts.session.finish()
        optimizer.advanced()
        if parts.session.rest.due is not None:
            parts.points.note_step(parts.session.store, optimizer.num_steps)
        else:
            parts.points.after_step(parts.session.store, optimizer.num_steps)
    return result


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
