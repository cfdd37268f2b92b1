"""What is asked: a model, what is to be trained on it, and a machine."""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from spillway.api import as_dtype
from spillway.hardware.calibration import as_seen
from spillway.hardware.catalogue import DRIVES, find_machine
from spillway.hardware.limits import process_bytes
from spillway.hardware.machine import this_machine
from spillway.hardware.present import refuse_missing
from spillway.integrations.huggingface import (
    CAUSAL_LM,
    build_from_config,
    config_of,
    cut_layers,
    find_directory,
    fitting_length,
    gpt2_config,
)
from spillway.model.profile import batch_rows
from spillway.optim.config import Rule, settings_of, state_format
from spillway.plan.make import fits, make_plan, swapped_plans
from spillway.plan.request import PlanRequest
from spillway.planner import PROCESS_RESERVE
from spillway.planning.profiler import ModelProfiler
from spillway.report.progress import Reporter
from spillway.rows import RowMaker
from spillway.spec.errors import UsageError
from spillway.spec.hardware import UPDATE_BYTES, Budget, HardwareSpec, device_bytes, host_bytes
from spillway.spec.machine import Drive, Machine, striped
from spillway.spec.model import ModelProfile
from spillway.spec.options import TrainOptions
from spillway.spec.plan import KeepPoints, Plan
from spillway.spec.sizes import format_size, parse_size
from spillway.spec.state import StateFormat
from spillway.store.layout import prevailing_dtype

# The GPT shapes of the papers: layers, heads, hidden (vocabulary 50,257).
GPT_SHAPES = {
    "gpt-1b": (24, 16, 2048),
    "gpt-10b": (48, 32, 4096),
    "gpt-13b": (40, 40, 5120),
    "gpt-33b": (60, 52, 6656),
    "gpt-65b": (80, 64, 8192),
    "gpt-135b": (88, 88, 11264),
    "gpt-175b": (96, 96, 12288),
    "gpt-276b": (112, 112, 14336),
    "gpt-412b": (128, 128, 16384),
    "gpt-805b": (160, 160, 20480),
}
# Libraries and a CUDA context, before anything of ours.
_PROCESS_BYTES = 2 << 30
# Micro-batches that are compared, the largest ones that fit.
_MICRO_BATCHES = 3
FIRST_DRIVE = "990pro"  # what would help a machine that has none


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A module of the user's, and keyword arguments of one forward of it."""

    module: nn.Module
    example: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """That most of its parameters have."""
        return prevailing_dtype((param.dtype, param.numel()) for param in self.module.parameters())

    def on_meta(self) -> nn.Module:
        """The module without its weights; it itself stays as it is."""
        params = dict(self.module.named_parameters())
        bare = {id(param): nn.Parameter(param.detach().to("meta"), param.requires_grad) for param in params.values()}
        return copy.deepcopy(self.module, dict(bare))

    def batch(self, rows: int) -> dict[str, Any]:
        """The example with so many rows."""
        have = batch_rows(self.example)

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != have:
                return tensor
            return tensor[torch.arange(rows) % have]

        return dict(tree_map_only(torch.Tensor, resized, dict(self.example)))


@dataclass(slots=True)
class Question:
    """A model, what is to be trained on it, and a machine. The model is built once, and a forward of it made once per
    shape of the batch."""

    options: TrainOptions
    machine: Machine
    measured: bool
    rows: int  # of an epoch of the data; 0 unknown
    own: OwnModel | None = None
    _profilers: dict[tuple[int | None, int], ModelProfiler] = field(default_factory=dict)
    _profiles: dict[tuple[int, int, int | None, int, StateFormat], ModelProfile] = field(default_factory=dict)

    def budget(self, machine: Machine) -> Budget:
        """What the options allow of the machine."""

        def given(text: str | None) -> int | None:
            return None if text is None else parse_size(text)

        options = self.options
        host, device, disk = given(options.host_memory), given(options.device_memory), given(options.disk_memory)
        host = host_bytes(machine.host_bytes, host)
        if machine.hardware.device == "cpu":
            device = host if device is None else min(device, host)
        else:
            device = device_bytes(machine.device_bytes, device)
        disk = machine.disk_bytes if disk is None else min(disk, machine.disk_bytes)
        return Budget(device, host, disk, self._process_bytes(machine))

    def _process_bytes(self, machine: Machine) -> int:
        """What a run takes of host memory before anything of ours: here, where no GPU wants its context, about what
        this process does."""
        if self.measured and machine.hardware.device == "cpu":
            return process_bytes() + PROCESS_RESERVE
        return _PROCESS_BYTES

    @property
    def steps(self) -> int:
        """Optimizer steps of the run, where the options or the data say so; otherwise 0."""
        options = self.options
        if options.max_steps > 0 or not self.rows:
            return max(options.max_steps, 0)
        batches = -(-self.rows // (options.per_device_train_batch_size * options.gradient_accumulation_steps))
        return max(math.ceil(options.num_train_epochs * batches), 1)

    def settings(self, **changed: Any) -> Rule:
        """The optimizer."""
        return settings_of(replace(self.options, **changed))

    def profile(self, layers: int | None = None) -> ModelProfile:
        """Of a step, and of so many blocks. Rows that are accumulated are computed one micro-batch after another inside
        each unit, as `train` does."""
        options = self.options
        length = 0 if self.own else row_length(options)
        micro = options.per_device_train_batch_size
        rows = micro * options.gradient_accumulation_steps
        form = state_format(self.settings())
        key = (rows, micro, layers, length, form)
        if key not in self._profiles:
            if self.own is not None:
                batch = self.own.batch(rows)
            else:
                ids = torch.zeros(rows, length, dtype=torch.int64)
                batch = {"input_ids": ids, "labels": ids}
            self._profiles[key] = self._profiler(layers, length).of(batch, micro, form)
        return self._profiles[key]

    def _profiler(self, layers: int | None, length: int) -> ModelProfiler:
        if (layers, length) not in self._profilers:
            if self.own is not None:
                model = self.own.on_meta()
            else:
                model = build(self.options.model, as_dtype(self.options.dtype), layers, length)
            self._profilers[layers, length] = ModelProfiler(model, self.machine.hardware.device)
        return self._profilers[layers, length]

    def plan(self, machine: Machine, profile: ModelProfile) -> Plan:
        """Raises PlanInfeasible."""
        return make_plan(profile, hardware_for(machine, profile), self.budget(machine), self._request(machine))

    def swapped(self) -> list[tuple[float, Plan]]:
        """Plans that move more and more activations, and how many bytes."""
        machine = self.machine
        budget, request = self.budget(machine), self._request(machine)
        return swapped_plans(self.profile(), hardware_for(machine, self.profile()), budget, request)

    def fits(self, machine: Machine, profile: ModelProfile) -> bool:
        """Whether there is a plan."""
        return fits(profile, machine.hardware, self.budget(machine), self._request(machine))

    def _request(self, machine: Machine) -> PlanRequest:
        options = self.options
        return PlanRequest(
            update=options.update,
            weights=options.weights,
            states=options.states,
            clip=self.settings().waits_for_norm(_dtype(options, self.own) is torch.float16),
            has_store=machine.disk_bytes > 0,
            keep=KeepPoints(options.save_total_limit),
            activations=options.activations,
            policy=options.policy,
            streams=options.streams,
        )


def hardware_for(machine: Machine, profile: ModelProfile) -> HardwareSpec:
    """The machine's rates for this optimizer and these weights. Known are those of exact AdamW on bfloat16 weights;
    what moves fewer bytes of a parameter is faster by so much, for all of them are bound by memory."""
    params = sum(unit.num_trainable for unit in profile.units)
    moved = sum(2 * unit.updated_bytes + unit.grad_bytes for unit in profile.units if unit.num_trainable)
    share, hardware = UPDATE_BYTES * params / moved if moved else 1.0, machine.hardware
    return replace(
        hardware,
        device_flops_per_s=rate_share(machine, profile) * hardware.device_flops_per_s,
        update_params_per_s=share * hardware.update_params_per_s,
        checksum_params_per_s=share * hardware.checksum_params_per_s,
        device_update_params_per_s=share * hardware.device_update_params_per_s,
    )


def rate_share(machine: Machine, profile: ModelProfile) -> float:
    """Of the device's 16-bit rate: for float32, where weights have four bytes, it is another."""
    params, size = (sum(getattr(unit, of) for unit in profile.units) for of in ("num_params", "weight_bytes"))
    return machine.float32_share if size > 3 * params else 1.0


def ask(options: TrainOptions, hardware: str | None, reporter: Reporter, own: OwnModel | None = None) -> Question:
    """The question about a machine by name, or about this one, measured. Raises UsageError for what makes no sense."""
    options.check()
    paths = tuple(map(Path, options.store))
    if hardware is None:
        refuse_missing(options.device)
        machine = this_machine(paths, _dtype(options, own), device=options.device)
        machine = replace(machine, hardware=as_seen(machine.hardware, paths))
    else:
        machine = find_machine(hardware)
    device = machine.host_bytes if machine.hardware.device == "cpu" else machine.device_bytes
    for tier, most in (("device", device), ("host", machine.host_bytes), ("disk", machine.disk_bytes)):
        memory = getattr(options, f"{tier}_memory")
        if memory is not None and parse_size(memory) > most:
            has = f"{machine.name} has {format_size(most)}"
            reporter.say(f"note: --{tier}-memory {memory} is more than there is: {has}")
    if own is None and (length := row_length(options)) < options.max_length:
        reporter.say(f"rows are {length} tokens long: the model has no more positions")
    return Question(options, machine, hardware is None, count_rows(options, reporter), own)


def asked(question: Question, machine: Machine, options: TrainOptions | None = None) -> Question:
    """The same question about another machine, or with other options."""
    return replace(question, options=options or question.options, machine=machine)


def with_batch_tokens(question: Question, tokens: int) -> Question:
    """With so many tokens a step: whole rows, and as many of them at a time inside each unit as make the fastest plan.
    Raises UsageError for less than a row."""
    length = row_length(question.options)
    rows = tokens // length
    if rows < 1:
        raise UsageError(f"--batch-tokens {tokens} is less than one row of {length} tokens: see --max-length")
    found: list[tuple[float, int, Question]] = []
    for micro in (count for count in range(rows, 0, -1) if rows % count == 0):
        cut = replace(question.options, per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro)
        other = asked(question, question.machine, cut)
        if other.fits(other.machine, other.profile()):
            found.append((other.plan(other.machine, other.profile()).step_seconds, -micro, other))
        if len(found) == _MICRO_BATCHES:
            break
    return min(found, key=lambda item: item[:2])[2] if found else other


def with_drives(machine: Machine, count: int) -> Machine:
    """The machine with so many of its drives; where they differ, with one of each in turn."""
    if not machine.drives:
        return _with_first_drives(machine, count)
    hardware, drives = machine.hardware, tuple(islice(cycle(machine.drives), count))
    before, after = striped(machine.drives), striped(drives)
    return replace(
        machine,
        drives=drives,
        price=machine.price + _price(drives) - _price(machine.drives) if machine.price else 0.0,
        disk_bytes=machine.disk_bytes * after.capacity_bytes // before.capacity_bytes,
        hardware=replace(
            hardware,
            read_bytes_per_s=hardware.read_bytes_per_s * after.read_bytes_per_s / before.read_bytes_per_s,
            write_bytes_per_s=hardware.write_bytes_per_s * after.write_bytes_per_s / before.write_bytes_per_s,
        ),
    )


def _price(drives: tuple[Drive, ...]) -> float:
    return sum(drive.price for drive in drives)


def _with_first_drives(machine: Machine, count: int) -> Machine:
    """A machine that has none, with drives as people have."""
    drives = (DRIVES[FIRST_DRIVE],) * count
    store = striped(drives)
    price = machine.price + _price(drives) if machine.price else 0.0
    hardware = replace(
        machine.hardware, read_bytes_per_s=store.read_bytes_per_s, write_bytes_per_s=store.write_bytes_per_s
    )
    return replace(machine, drives=drives, disk_bytes=store.capacity_bytes, hardware=hardware, price=price)


def row_length(options: TrainOptions) -> int:
    """--max-length, or what the model has positions for."""
    if gpt_shape(options.model):
        return options.max_length
    return fitting_length(find_directory(options.model), options.max_length)


def count_rows(options: TrainOptions, reporter: Reporter) -> int:
    """Rows of an epoch, where it matters; otherwise 0."""
    if options.max_steps > 0 or not options.data:
        return 0
    if gpt_shape(options.model):
        raise UsageError(f"{options.model} is a shape without a tokenizer: leave DATA out, or give --max-steps")
    rows = RowMaker.of(find_directory(options.model), row_length(options), options.packing)
    with reporter.counting("reading data") as counter:
        samples = rows.read(options.data, counter.reach).samples
    return rows.batches(samples, 1, options.seed).per_epoch()


def gpt_shape(name: str) -> tuple[int, int, int] | None:
    """Layers, heads and width of one of the papers' shapes. Raises UsageError for one that they do not have."""
    shape = GPT_SHAPES.get(name.lower())
    if shape is None and re.fullmatch(r"gpt-[0-9.]+b", name.lower()):
        raise UsageError(f"there is no shape '{name}': known are {', '.join(GPT_SHAPES)}")
    return shape


def _dtype(options: TrainOptions, own: OwnModel | None) -> torch.dtype:
    return as_dtype(options.dtype) if own is None else own.dtype


def build(name: str, dtype: torch.dtype, layers: int | None = None, positions: int = 0) -> nn.Module:
    """A model on the meta device by directory (only its config.json is read), hub name, or shape of the papers."""
    shape = gpt_shape(name)
    config = gpt2_config(*shape, max(positions, 1024)) if shape else config_of(find_directory(name))
    if layers is not None:
        cut_layers(config, layers)
    return build_from_config(config, CAUSAL_LM, dtype)
