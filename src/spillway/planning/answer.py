"""The whole answer of `spillway plan`: what a plan promises, and what would help."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from spillway.model.profile import batch_rows
from spillway.optim.config import NAMED
from spillway.planning.figures import report_on
from spillway.planning.question import FIRST_DRIVE, OwnModel, Question, ask, asked, with_drives
from spillway.report.progress import Reporter
from spillway.runtime.unit import is_streamed
from spillway.spec.answers import Help, PlanReport
from spillway.spec.errors import UsageError
from spillway.spec.hardware import DEVICE_RESERVE
from spillway.spec.options import TrainOptions
from spillway.spec.plan import TierPeaks
from spillway.spec.sizes import parse_size, typed_size_up

_MOST_HELPS = 3  # of what would make it fit
_HOST_SIZES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # GB that machines come with


def answer(question: Question) -> PlanReport:
    """Plan, predict, and try what would help."""
    report = report_on(question)
    helps = _what_would_help(question, report) if report.fits else _what_would_fit(question, report.peaks)
    return replace(report, helps=helps)


def predict(
    model: str | nn.Module,
    hardware: str | None = None,
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    example: Mapping[str, Any] | None = None,
    **options: Any,
) -> PlanReport:
    """What `spillway plan` answers: will it fit, how fast, why, and what would help.

    `model`: a directory with a config.json, a hub name, one of the papers' shapes, or any module (on the meta device,
    too) with an `example`, keyword arguments of one forward; what is computed at a time is then as many rows. The
    module stays as it is. `hardware`: a name, parts such as "rtx4090+4x990pro+128GB", or a TOML file; None: this
    machine, measured. `data`: one path or several. `options`: fields of TrainOptions; `store` may be one path, too.
    Raises UsageError.
    """
    stores = _several(options.pop("store", ())) or (".",)
    own = None
    if isinstance(model, nn.Module):
        if any(map(is_streamed, model.modules())):
            raise UsageError("the model streams already: ask predict before prepare, or of another of its kind")
        if example is None:
            raise UsageError("a module is planned with an example: predict(model, example={...}) of one forward")
        own = OwnModel(model, example)
        options = {"per_device_train_batch_size": max(batch_rows(example), 1), **options}
    known = [field.name for field in fields(TrainOptions)]
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, 1)
            raise UsageError(f"predict has no option {option}" + (f"; did you mean {near[0]}?" if near else ""))
    name = model if isinstance(model, str) else type(model).__name__
    given = TrainOptions(model=name, data=_several(data), output_dir="", store=stores, **options)
    return answer(ask(given, hardware, Reporter(), own))


def _several(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    return (os.fspath(paths),) if isinstance(paths, str | os.PathLike) else tuple(str(path) for path in paths)


def _changes(question: Question) -> list[tuple[str, Question]]:
    """What one could change, one thing at a time."""
    machine, options = question.machine, question.options
    more = 64 * 10**9
    more_memory = replace(machine, host_bytes=machine.host_bytes + more)
    raised = options
    if options.host_memory is not None:
        raised = replace(options, host_memory=str(parse_size(options.host_memory) + more))
    twice = replace(options, gradient_accumulation_steps=2 * options.gradient_accumulation_steps)
    found = [
        (
            "one more drive" if machine.drives else f"a drive ({FIRST_DRIVE})",
            asked(question, with_drives(machine, len(machine.drives) + 1)),
        ),
        ("64 GB more host memory", asked(question, more_memory, raised)),
        ("twice the batch", asked(question, machine, twice)),
    ]
    eight = f"{options.optim}_8bit"
    if eight in NAMED:
        found.append((f"--optim {eight}", asked(question, machine, replace(options, optim=eight))))
    if options.max_grad_norm > 0:
        found.append(("--max-grad-norm 0", asked(question, machine, replace(options, max_grad_norm=0.0))))
    return found


def _what_would_help(question: Question, report: PlanReport) -> tuple[Help, ...]:
    helps = []
    for change, other in _changes(question):
        found = report_on(other)
        if found.fits and found.tokens_per_s > 1.01 * report.tokens_per_s:
            helps.append(Help(change, found.tokens_per_s / report.tokens_per_s - 1))
    return tuple(sorted(helps, key=lambda item: -item.gain))


def _larger_budgets(question: Question, smallest: TierPeaks) -> list[tuple[str, Question]]:
    """The budgets that were given, as much larger as the smallest plan needs them, where the machine has that much."""
    options, budget = question.options, question.budget(question.machine)
    on_device = 0 if question.machine.hardware.device == "cpu" else DEVICE_RESERVE
    needs = {
        "device_memory": (smallest.device, budget.device_bytes, on_device),
        "host_memory": (smallest.host, budget.host_bytes, 0),
        "disk_memory": (smallest.disk, budget.disk_bytes, 0),
    }
    raised: dict[str, Any] = {
        name: typed_size_up(need + beside)
        for name, (need, have, beside) in needs.items()
        if need > have and getattr(options, name) is not None
    }
    flags = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in raised.items())
    return [(flags, asked(question, question.machine, replace(options, **raised)))] if raised else []


def _what_would_fit(question: Question, smallest: TierPeaks) -> tuple[Help, ...]:
    """Changes after which it would fit. `smallest`: what the smallest plan needs."""
    budgets, ways = _larger_budgets(question, smallest), _one_row_at_a_time(question)
    if not any(map(_fits, budgets)):  # otherwise the machine is not what is short
        ways += [*_changes(question), *_smaller_batches(question), *_larger_machines(question)]
    fitting = (change for change, _ in filter(_fits, [*budgets, *ways]))
    return tuple(Help(change, 0.0) for change in _one_of_each(fitting, _MOST_HELPS))


def _fits(way: tuple[str, Question]) -> bool:
    _, other = way
    return other.fits(other.machine, other.profile())


def _one_row_at_a_time(question: Question) -> list[tuple[str, Question]]:
    options, rows = question.options, question.options.per_device_train_batch_size
    if rows == 1:
        return []
    cut = rows * options.gradient_accumulation_steps
    single = replace(options, per_device_train_batch_size=1, gradient_accumulation_steps=cut)
    flags = f"--per-device-train-batch-size 1 --gradient-accumulation-steps {cut}"
    return [(flags, asked(question, question.machine, single))]


def _smaller_batches(question: Question) -> list[tuple[str, Question]]:
    options, rows = question.options, question.options.per_device_train_batch_size
    whole, found = rows * options.gradient_accumulation_steps, []
    for factor in (2, 4, 8, 16, 32):
        at_once = min(rows, whole // factor)
        if whole % factor == 0 and whole // factor % at_once == 0:
            steps = whole // factor // at_once
            fewer = replace(options, per_device_train_batch_size=at_once, gradient_accumulation_steps=steps)
            found.append((f"1/{factor} of the batch", asked(question, question.machine, fewer)))
    return found


def _larger_machines(question: Question) -> list[tuple[str, Question]]:
    machine, free = question.machine, replace(question.options, host_memory=None)
    found = [
        (f"{size} GB of host memory", asked(question, replace(machine, host_bytes=size * 10**9), free))
        for size in _HOST_SIZES
        if size * 10**9 > machine.host_bytes
    ]
    for factor in (2, 4, 8) if machine.drives else ():
        more = with_drives(machine, factor * len(machine.drives))
        found.append((f"{factor} times the drives", asked(question, more)))
    return found


def _one_of_each(changes: Iterable[str], count: int) -> list[str]:
    """The first changes, and of those that only differ in how much the first."""
    found: dict[str, str] = {}
    for change in changes:
        found.setdefault("".join(letter for letter in change if not letter.isdigit()), change)
        if len(found) == count:
            break
    return list(found.values())
