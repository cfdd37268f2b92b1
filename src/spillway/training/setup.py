"""Everything of a run that can fail early, done before its first step: data, model, plan, memory, disk, saving."""

import math
import shutil
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file
from torch import nn

from spillway import native
from spillway.api import as_dtype, close, load, prepare
from spillway.assembly import Prepared, prepared
from spillway.checkpoint.load import StoreBytes, read_parameter
from spillway.checkpoint.save import refuse_full, save_weights, weights_bytes
from spillway.checkpoint.sources import persistent_buffers
from spillway.data import Batches, Encoded, data_files
from spillway.evaluate import Evaluation
from spillway.hardware.present import has_slow_16_bits
from spillway.integrations.huggingface import CAUSAL_LM, find_directory, fitting_length
from spillway.integrations.tokenizer import fingerprints
from spillway.optim.config import settings_of
from spillway.optim.optimizer import StreamingOptimizer
from spillway.plan.memory import phase_peaks
from spillway.report.progress import Reporter
from spillway.rows import RowMaker
from spillway.rundir import (
    is_free,
    model_in,
    note_saved,
    remember_stores,
    store_directories,
    stores_of_last_time,
    where_saved,
)
from spillway.runtime.schedules import Schedule
from spillway.runtime.session import Session
from spillway.spec.errors import BudgetWarning, DiskError, StoreMoves, UsageError
from spillway.spec.options import TrainOptions
from spillway.spec.plan import KeepPoints, Plan, TierPeaks
from spillway.spec.sizes import counted
from spillway.spec.words import as_flags
from spillway.store.move import drop_left_behind
from spillway.training.identity import identity_of, is_resumed
from spillway.training.samples import remember_samples, what_differs


@dataclass(frozen=True, slots=True)
class Training:
    """What a run trains with, all of it ready: the longest batch has a plan and its memory, and saving works."""

    options: TrainOptions
    origins: dict[str, str]  # where each option's value comes from
    directory: Path
    stores: tuple[Path, ...]
    max_length: int
    identity: dict[str, Any]
    batches: Batches
    evaluation: Evaluation | None
    total: int  # steps
    model: nn.Module
    optimizer: StreamingOptimizer
    parts: Prepared
    plan: Plan
    phases: dict[str, TierPeaks]  # what its phases take
    is_resumed: bool

    @property
    def output(self) -> Path:
        """Where the trained model goes."""
        return model_in(self.directory)

    @property
    def session(self) -> Session:
        """The model in training."""
        return self.parts.session

    @property
    def state_bytes(self) -> int:
        """Weights, states and gradients of the whole model."""
        return sum(unit.layout.extent_bytes + unit.layout.grad_bytes for unit in self.session.units)


def set_up(options: TrainOptions, origins: dict[str, str], reporter: Reporter, stack: ExitStack) -> Training:
    """Make a run ready; `stack` releases memory, files and locks. Raises a SpillwayError for what the user can mend."""
    say = reporter.say
    if not options.output_dir:
        raise UsageError("--output-dir is empty: is a variable of the shell not set?")
    list(data_files((*options.data, *options.eval_data)))  # a missing one is named before anything is read
    if native.load_problem():
        say(f"note: {native.load_problem()}: PyTorch and preadv do its work, slower")
    source = find_directory(options.model, options.allow_pickle)
    rows = RowMaker.of(source, _row_length(options, origins, source, reporter), options.packing)
    directory = Path(options.output_dir)
    _refuse_among_data(options, (directory,))
    _make_directory(directory)
    stores = store_directories(options, directory)
    _refuse_among_data(options, stores)
    data = _read(options, rows, reporter)
    held_out = _read_held_out(options, rows, reporter)
    identity = identity_of(options, fingerprints(rows.tokenizer), data)
    saved_in = where_saved(options, directory)
    resumed = is_resumed(
        identity, options, directory, stores, saved_in, reporter, lambda: what_differs(directory, data)
    )
    torch.manual_seed(options.seed)
    say(f"building {source} and planning")
    model = load(source, CAUSAL_LM, as_dtype(options.dtype), allow_pickle=options.allow_pickle)
    size = options.per_device_train_batch_size * options.gradient_accumulation_steps
    batches = rows.batches(data.samples, size, options.seed)
    optimizer = _prepare(options, model, stores, saved_in if resumed else False, reporter)
    stack.callback(close, model)
    parts = prepared(model)
    parts.points.on_commit = lambda step: note_saved(directory, step)
    model.train()
    _tell_slow_dtype(options, parts, reporter)
    schedule = _open(parts, batches, reporter)
    plan = schedule.plan
    phases = phase_peaks(schedule.profile, plan, parts.budget.process_bytes, parts.session.device.kind == "cpu")
    training = Training(
        options, origins, directory, stores, rows.length, identity, batches, held_out, _count_steps(options, batches),
        model, optimizer, parts, plan, phases, resumed,
    )  # fmt: skip
    _exercise_save(training)
    remember_samples(directory, data)
    drop_left_behind(stores_of_last_time(directory), training.session.store.homes.need_disk().geometry)
    remember_stores(directory, stores)
    return training


def _tell_slow_dtype(options: TrainOptions, parts: Prepared, reporter: Reporter) -> None:
    if parts.session.device.kind == "cpu" and options.dtype != "float32" and has_slow_16_bits():
        reporter.say(
            f"warning: this processor has no fast {options.dtype} and computes it many times slower than float32: "
            f"--dtype float32"
        )


def _refuse_among_data(options: TrainOptions, directories: tuple[Path, ...]) -> None:
    """Raise UsageError for a directory whose own files would be read as data when the run goes on."""
    for given in map(Path, (*options.data, *options.eval_data)):
        for directory in directories if given.is_dir() else ():
            below, top = directory.resolve(), given.resolve()
            if below.is_relative_to(top) and not any(part.startswith(".") for part in below.relative_to(top).parts):
                raise UsageError(
                    f"{directory} lies in the data directory {given}, where the run's own files would be read as data: "
                    f"choose another --output-dir or --store"
                )


def _make_directory(directory: Path) -> None:
    if not is_free(directory):
        raise UsageError(
            f"{directory} holds files that are not of a run (a model's config.json?): choose another --output-dir"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".writable").write_text("")
        (directory / ".writable").unlink()
    except OSError as error:
        raise UsageError(f"the run directory {directory} cannot be written: {error.strerror}") from error


def _row_length(options: TrainOptions, origins: dict[str, str], source: Path, reporter: Reporter) -> int:
    """--max-length, or by default what the model has positions for. Raises UsageError for a longer one."""
    asked = options.max_length
    most = fitting_length(source, asked)
    if most == asked:
        return asked
    if origins.get("max_length", "default") != "default":
        raise UsageError(f"--max-length {asked} is more than the model's {most} positions")
    reporter.say(f"rows are {most} tokens long: the model has no more positions")
    return most


def _read(options: TrainOptions, rows: RowMaker, reporter: Reporter) -> Encoded:
    with reporter.counting("reading data") as counter:
        data = rows.read(options.data, counter.reach)
    reporter.say(
        f"data: {counted(data.num_records, 'record')}, {counted(len(data.samples), 'sample')}, "
        f"{counted(data.num_tokens, 'token')}, {data.num_trained / data.num_tokens:.0%} trained, "
        f"{data.num_truncated} cut at {rows.length}"
        + (f", {data.num_lost} of them with nothing left to train" if data.num_lost else "")
    )
    if data.num_truncated > len(data.samples) / 2:
        reporter.say(f"warning: more than half of the samples are cut: is --max-length {rows.length} meant?")
    if options.packing and not rows.packs:
        reporter.say(
            "note: each row holds one sample: with several, this model would not see where one ends; samples of like "
            "length waste least"
        )
    return data


def _read_held_out(options: TrainOptions, rows: RowMaker, reporter: Reporter) -> Evaluation | None:
    if not options.eval_data:
        return None
    with reporter.counting("reading held-out data") as counter:
        found = rows.read(options.eval_data, counter.reach)
    reporter.say(
        f"held-out data: {counted(found.num_records, 'record')}, {counted(found.num_trained, 'trained token')}"
    )
    return Evaluation(rows.batches(found.samples, options.per_device_train_batch_size, seed=0))


def _count_steps(options: TrainOptions, batches: Batches) -> int:
    if options.max_steps > 0:
        return options.max_steps
    return max(math.ceil(options.num_train_epochs * batches.per_epoch()), 1)


def _prepare(
    options: TrainOptions, model: nn.Module, stores: tuple[Path, ...], resume: bool | Path, reporter: Reporter
) -> StreamingOptimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("always", BudgetWarning)
        warnings.simplefilter("always", StoreMoves)
        _say_ours(reporter)
        _, optimizer = prepare(
            model,
            settings_of(options),
            store=stores,
            resume=resume,
            keep=KeepPoints(options.save_total_limit),
            **options.placement(),
        )
    extra = prepared(model).origins.unexpected
    if extra:
        names = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
        reporter.say(f"warning: {options.model} has {len(extra)} tensors this model has no use for: {names}")
    return optimizer


def _say_ours(reporter: Reporter) -> None:
    """Warnings of ours are lines of the run, as soon as they are given, until the caller's `catch_warnings` ends."""
    show = warnings.showwarning

    def say(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, (BudgetWarning, StoreMoves)):
            reporter.say(f"note: {as_flags(str(message))}")
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = say


def _open(parts: Prepared, batches: Batches, reporter: Reporter) -> Schedule:
    """Plan for the longest batch, take the memory, and bring weights and states to rest."""
    session = parts.session
    longest = {key: tensor.to(session.device.torch_device) for key, tensor in batches.longest().items()}
    schedule = session.open((), longest)
    for warning in parts.points.warnings:
        reporter.say(f"warning: {warning}")
    return schedule


def _exercise_save(training: Training) -> None:
    """Write, read back and compare a part of the model as it will be written at the end, and see that the rest has
    room. Raises DiskError."""
    units, output = training.session.units, training.output
    refuse_full(output, weights_bytes(units), "--output-dir")
    trial = training.directory / "save-trial"
    index = min(range(len(units)), key=lambda unit: units[unit].layout.weight_bytes)
    unit = units[index]
    source = StoreBytes(training.session.store)
    names = save_weights(source, units, persistent_buffers(training.model), trial, only=index)
    written = load_file(trial / names[0])
    for place in unit.layout.places:
        if not torch.equal(written[place.name], read_parameter(source, index, place, unit.layout)):
            raise DiskError(f"{place.name} came back changed from {trial}: the drive or its file system is faulty")
    shutil.rmtree(trial)
