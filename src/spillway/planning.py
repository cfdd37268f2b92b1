"""`spillway plan`: will it fit, how fast, why, and what would help; without loading a weight."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from spillway.api import as_dtype, model_profiler
from spillway.data import Batches, encode_files
from spillway.integrations.huggingface import (
    CAUSAL_LM,
    build_from_config,
    config_of,
    cut_layers,
    find_directory,
    gpt2_config,
    max_positions,
)
from spillway.integrations.tokenizer import load_tokenizer, pad_id
from spillway.optim.config import NAMED, Rule, settings_of, state_format
from spillway.plan.request import PlanRequest
from spillway.plan.search import fits, make_plan
from spillway.plan.simulate import simulate
from spillway.report.progress import Reporter
from spillway.spec.answers import Help, PlanReport
from spillway.spec.errors import PlanInfeasible, UsageError
from spillway.spec.hardware import Budget
from spillway.spec.machine import Machine
from spillway.spec.model import ModelProfile
from spillway.spec.options import TrainOptions
from spillway.spec.plan import KeepPoints, Plan, TierPeaks
from spillway.spec.sizes import format_size, parse_size
from spillway.spec.trace import Trace

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
}
# Libraries and a CUDA context, before anything of ours.
_PROCESS_BYTES = 2 << 30
# A prediction from catalogue figures is not worth more than this; from measured ones half of it.
_SPREAD_CATALOGUE, _SPREAD_MEASURED = 0.25, 0.12
_SECONDS_OF_OWNERSHIP = 3 * 365 * 24 * 3600  # a machine is paid for in three years


@dataclass(slots=True)
class Question:
    """A model, what is to be trained on it, and a machine. Profiles are made once per shape of the batch."""

    options: TrainOptions
    machine: Machine
    measured: bool
    steps: int
    _profiles: dict[tuple[int, int, int | None, str, int], ModelProfile] = field(default_factory=dict)

    def budget(self, machine: Machine) -> Budget:
        """What the options allow of the machine."""

        def given(text: str | None, most: int) -> int:
            return most if text is None else min(parse_size(text), most)

        host = given(self.options.host_memory, int(0.9 * machine.host_bytes))
        process = min(_PROCESS_BYTES, host // 4)
        device = host if machine.hardware.device == "cpu" else int(0.95 * machine.device_bytes)
        disk = given(self.options.disk_memory, machine.disk_bytes)
        return Budget(given(self.options.device_memory, device), host, disk, process)

    def settings(self, **changed: Any) -> Rule:
        """The optimizer."""
        return settings_of(replace(self.options, **changed))

    def profile(self, rows: int | None = None, layers: int | None = None, settings: Rule | None = None) -> Any:
        """Of a step with so many rows (as many as the options say), and of so many blocks. Rows that are accumulated
        are computed one micro-batch after another inside each unit, as `train` does."""
        options = self.options
        length = fitting_length(options)
        rows = rows or options.per_device_train_batch_size * options.gradient_accumulation_steps
        settings = settings or self.settings()
        form = state_format(settings)
        micro = min(options.per_device_train_batch_size, rows)
        key = (rows, micro, layers, repr(form), length)
        if key not in self._profiles:
            model = build(self.options.model, as_dtype(self.options.dtype), layers, length)
            self._profiles[key] = model_profiler(model, form, rows, length, micro)
        return self._profiles[key]

    def plan(self, machine: Machine, profile: ModelProfile) -> Plan:
        """Raises PlanInfeasible."""
        return make_plan(profile, machine.hardware, self.budget(machine), self._request(machine))

    def fits(self, machine: Machine, profile: ModelProfile) -> bool:
        """Whether there is a plan."""
        return fits(profile, machine.hardware, self.budget(machine), self._request(machine))

    def _request(self, machine: Machine) -> PlanRequest:
        options = self.options
        return PlanRequest(
            options.update,
            options.weights,
            options.states,
            options.max_grad_norm > 0,
            1,
            machine.disk_bytes > 0,
            KeepPoints(options.save_total_limit, True),
            options.activations,
            options.policy,
        )


def fitting_length(options: TrainOptions) -> int:
    """--max-length, or what the model has positions for."""
    if gpt_shape(options.model):
        return options.max_length
    return min(options.max_length, max_positions(find_directory(options.model)) or options.max_length)


def count_steps(options: TrainOptions, reporter: Reporter) -> int:
    """Optimizer steps of the run, where the options or the data say so; otherwise 0."""
    if options.max_steps > 0 or not options.data:
        return max(options.max_steps, 0)
    tokenizer, length = load_tokenizer(find_directory(options.model)), fitting_length(options)
    with reporter.counting("reading data") as counter:
        encoded = encode_files(options.data, tokenizer, length, counter.reach)
    rows = options.per_device_train_batch_size * options.gradient_accumulation_steps
    batches = Batches(encoded.samples, rows, length, options.seed, options.packing, pad_id(tokenizer))
    return max(math.ceil(options.num_train_epochs * batches.per_epoch()), 1)


def gpt_shape(name: str) -> tuple[int, int, int] | None:
    """Layers, heads and width of one of the papers' shapes. Raises UsageError for one that they do not have."""
    shape = GPT_SHAPES.get(name.lower())
    if shape is None and re.fullmatch(r"gpt-[0-9.]+b", name.lower()):
        raise UsageError(f"there is no shape '{name}': known are {', '.join(GPT_SHAPES)}")
    return shape


def build(name: str, dtype: torch.dtype, layers: int | None = None, positions: int = 0) -> nn.Module:
    """A model on the meta device by directory (only its config.json is read), hub name, or shape of the papers."""
    shape = gpt_shape(name)
    config = gpt2_config(*shape, max(positions, 1024)) if shape else config_of(find_directory(name))
    if layers is not None:
        cut_layers(config, layers)
    return build_from_config(config, CAUSAL_LM, dtype)


def answer(question: Question, with_help: bool = True) -> PlanReport:
    """Plan, predict, and try what would help."""
    profile = question.profile()
    budget = question.budget(question.machine)
    params = sum(unit.num_params for unit in profile.units)
    base = PlanReport(
        question.options.model,
        question.machine.name,
        params,
        profile.tokens,
        False,
        "",
        budget,
        TierPeaks(0, 0, 0),
        run_steps=question.steps,
    )
    try:
        plan = question.plan(question.machine, profile)
    except PlanInfeasible as error:
        helps = _what_would_fit(question, profile) if with_help else ()
        return replace(base, problem=str(error), peaks=error.smallest, helps=helps)
    report = _figures(base, question, question.machine, plan, profile)
    return replace(report, helps=_what_would_help(question, report)) if with_help else report


def trace_of(question: Question) -> tuple[Trace, list[str]]:
    """The predicted trace of a step, and the names of the units. Raises PlanInfeasible."""
    profile = question.profile()
    plan = question.plan(question.machine, profile)
    return simulate(plan.ops, plan.pools, question.machine.hardware), [unit.name for unit in profile.units]


def largest(question: Question, progress: Callable[[str], None]) -> tuple[int, int]:
    """Most blocks of this model's width that can be trained, and their parameters. Raises PlanInfeasible where not even
    one can."""
    one, two = question.profile(layers=1), question.profile(layers=2)
    params_of = [sum(unit.num_params for unit in profile.units) for profile in (one, two)]
    question.plan(question.machine, one)

    def fit(layers: int) -> bool:
        progress(f"{layers} blocks")
        return question.fits(question.machine, _repeat_blocks(two, layers))

    low, high = 1, 2
    while high < 4096 and fit(high):
        low, high = high, 2 * high
    while high - low > max(low // 64, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low, params_of[0] + (low - 1) * (params_of[1] - params_of[0])


def sweep(question: Question, what: str) -> list[tuple[str, PlanReport]]:
    """Answers along one axis: batch, drives or host-memory."""
    points: list[tuple[str, PlanReport]] = []
    machine, rows = question.machine, question.options.per_device_train_batch_size
    if what == "batch":
        for factor in (1, 2, 4, 8, 16, 32):
            changed = replace(question.options, gradient_accumulation_steps=factor)
            points.append((f"{rows * factor} rows", answer(_asked(question, machine, changed), False)))
    elif what == "drives":
        for count in (1, 2, 3, 4, 6, 8, 12):
            points.append((f"{count} drives", answer(_asked(question, with_drives(machine, count)), False)))
    elif what == "host-memory":
        for size in (16, 32, 64, 128, 256, 512, 768, 1024):
            other = replace(machine, host_bytes=size * 10**9)
            free = replace(question.options, host_memory=None)
            points.append((f"{size} GB", answer(_asked(question, other, free), False)))
    else:
        raise UsageError(f"--sweep {what} is not one of batch, drives, host-memory")
    return points


def with_drives(machine: Machine, count: int) -> Machine:
    """The machine with so many of its drives."""
    have = max(len(machine.drives), 1)
    hardware, scale = machine.hardware, count / have
    drives = tuple(machine.drives[:1] * count)
    return replace(
        machine,
        drives=drives,
        disk_bytes=int(machine.disk_bytes * scale),
        hardware=replace(
            hardware,
            read_bytes_per_s=hardware.read_bytes_per_s * scale,
            write_bytes_per_s=hardware.write_bytes_per_s * scale,
        ),
    )


def _figures(base: PlanReport, question: Question, machine: Machine, plan: Plan, profile: ModelProfile) -> PlanReport:
    trace = simulate(plan.ops, plan.pools, machine.hardware)
    flops = 3 * sum(call.flops for call in profile.calls)
    spread = _SPREAD_MEASURED if question.measured else _SPREAD_CATALOGUE
    run = plan.step_seconds * question.steps
    tokens_per_s = base.tokens / plan.step_seconds
    endurance = machine.endurance_bytes
    per_second = machine.price / _SECONDS_OF_OWNERSHIP
    return replace(
        base,
        fits=True,
        peaks=plan.peaks,
        step_seconds=plan.step_seconds,
        clipped_step_seconds=plan.wary_step_seconds,
        tokens_per_s=tokens_per_s,
        model_flops_per_s=flops / plan.step_seconds,
        peak_share=flops / plan.step_seconds / machine.peak_flops_per_s if machine.peak_flops_per_s else 0.0,
        bottleneck=plan.bottleneck,
        busy_share={lane: busy / trace.seconds for lane, busy in trace.busy_s().items()},
        update=plan.placement.update,
        placement={
            part: _count([getattr(where, part) for where in plan.placement.units]) for part in ("weights", "states")
        },
        written_bytes=plan.bytes_written,
        run_seconds=((1 - spread) * run, (1 + spread) * run),
        run_written_bytes=plan.bytes_written * question.steps,
        endurance_share=plan.bytes_written * question.steps / endurance if endurance else 0.0,
        dollars_per_million_tokens=per_second / tokens_per_s * 1e6,
        notes=plan.notes,
    )


def _count(tiers: list[str]) -> dict[str, int]:
    return {tier: tiers.count(tier) for tier in ("device", "host", "disk") if tier in tiers}


def _asked(question: Question, machine: Machine, options: TrainOptions | None = None) -> Question:
    options = options or question.options
    return Question(options, machine, question.measured, question.steps, question._profiles)


def _changes(question: Question) -> list[tuple[str, Question]]:
    """What one could change, one thing at a time."""
    machine, options = question.machine, question.options
    more_memory = replace(machine, host_bytes=machine.host_bytes + 64 * 10**9)
    free = replace(options, host_memory=None)
    twice = replace(options, gradient_accumulation_steps=2 * options.gradient_accumulation_steps)
    found = [
        ("one more drive", _asked(question, with_drives(machine, len(machine.drives) + 1))),
        ("64 GB more host memory", _asked(question, more_memory, free)),
        ("twice the batch", _asked(question, machine, twice)),
    ]
    if NAMED[options.optim][1] == "float32":
        eight = "adamw_8bit" if options.optim.startswith("adamw") else "lion_8bit"
        found.append((f"--optim {eight}", _asked(question, machine, replace(options, optim=eight))))
    if options.max_grad_norm > 0:
        found.append(("--max-grad-norm 0", _asked(question, machine, replace(options, max_grad_norm=0.0))))
    if not machine.drives:
        found.pop(0)
    return found


def _what_would_help(question: Question, report: PlanReport) -> tuple[Help, ...]:
    helps = []
    for change, other in _changes(question):
        found = answer(other, with_help=False)
        if found.fits and found.tokens_per_s > 1.01 * report.tokens_per_s:
            helps.append(Help(change, found.tokens_per_s / report.tokens_per_s - 1))
    return tuple(sorted(helps, key=lambda item: -item.gain))


def _what_would_fit(question: Question, profile: ModelProfile) -> tuple[Help, ...]:
    """Changes after which it would fit."""
    options, rows = question.options, question.options.per_device_train_batch_size
    tries = _changes(question)
    machine, free = question.machine, replace(options, host_memory=None)
    if rows > 1:
        cut = rows * options.gradient_accumulation_steps
        single = replace(options, per_device_train_batch_size=1, gradient_accumulation_steps=cut)
        flags = f"--per-device-train-batch-size 1 --gradient-accumulation-steps {cut}"
        tries.insert(0, (flags, _asked(question, machine, single)))
    for factor in (2, 4, 8):
        larger = replace(machine, host_bytes=machine.host_bytes * factor)
        tries.append((f"{format_size(larger.host_bytes)} of host memory", _asked(question, larger, free)))
        if machine.drives:
            more = with_drives(machine, factor * len(machine.drives))
            tries.append((f"{factor} times the drives", _asked(question, more)))
    return tuple(Help(change, 0.0) for change, other in tries if answer(other, with_help=False).fits)[:3]


def _repeat_blocks(two: ModelProfile, layers: int) -> ModelProfile:
    """The profile of a model with `layers` alike blocks, from that of one with two."""
    blocks = [index for index in range(len(two.units) - 1) if _alike(two, index)]
    if not blocks:
        raise UsageError("this model's blocks are not alike: the largest one cannot be told from two of them")
    first = blocks[-1]
    units = [*two.units[: first + 1], *[two.units[first + 1]] * (layers - 1), *two.units[first + 2 :]]
    calls = []
    for call in two.calls:
        shift = layers - 2 if call.unit > first + 1 else 0
        if call.unit == first + 1:
            calls += [replace(call, unit=first + 1 + index) for index in range(layers - 1)]
        else:
            calls.append(replace(call, unit=call.unit + shift))
    resident = two.resident_unit
    moved = resident + layers - 2 if resident is not None and resident > first + 1 else resident
    return replace(two, units=tuple(units), calls=tuple(calls), resident_unit=moved)


def _alike(profile: ModelProfile, index: int) -> bool:
    here, there = profile.units[index], profile.units[index + 1]
    return (here.num_params, here.weight_bytes) == (there.num_params, there.weight_bytes) and here.num_params > 0
