"""`spillway plan`, `spillway probe`, `spillway doctor`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from spillway.cli.options import add_options, config_option
from spillway.cli.pictures import PICTURES, check_picture
from spillway.spec.errors import UsageError
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions
from spillway.spec.sizes import format_seconds
from spillway.spec.words import as_flags

if TYPE_CHECKING:
    from spillway.planning.question import Question
    from spillway.report.progress import Reporter

_KEPT = (
    "store", "device", "device_memory", "host_memory", "disk_memory", "max_length", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_steps", "num_train_epochs", "optim", "master_bits", "max_grad_norm", "dtype",
    "update", "activations", "weights", "states", "policy", "streams", "save_steps", "save_total_limit",
)  # fmt: skip
_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")


@click.command("plan")
@click.argument("model")
@click.argument("data", nargs=-1)
@add_options(TrainOptions, _KEPT)
@config_option(TrainOptions)
@click.option(
    "--hardware",
    metavar="H",
    help="Machine: a name, parts such as rtx4090+4x990pro+128GB, or a TOML file. Default: this one.",
)
@click.option("--batch-tokens", type=int, metavar="N", help="Tokens per step; the micro-batch is chosen for you.")
@click.option("--max-size", is_flag=True, help="Find the largest model of this width that fits.")
@click.option("--sweep", metavar="AXIS", help="Plot against batch, drives, host-memory or swapped (activations).")
@click.option(
    "--chart", metavar="FILE", help="The predicted step, .json (ui.perfetto.dev) or .png; or the --sweep, .png."
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON on standard output.")
@click.pass_context
def plan_command(
    context: click.Context,
    /,
    model: str,
    data: tuple[str, ...],
    hardware: str | None,
    batch_tokens: int | None,
    max_size: bool,
    sweep: str | None,
    chart: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Will MODEL fit, how fast will it train, and what would help; on this machine or any other.

    Needs only the model's config.json; the papers' shapes go by name (gpt-13b, gpt-175b). With DATA the length of the
    run is counted. --policy plans as another system would (lohan, zero-infinity, ...).

    \b
    Examples:
      spillway plan ./llama-8b
      spillway plan ./llama-8b chats.jsonl --hardware rtx4090+2x990pro+64GB
      spillway plan gpt-13b --hardware lohan-4090 --batch-tokens 65536 --max-length 1024
      spillway plan gpt-13b --hardware lohan-4090 --policy zero-infinity
      spillway plan gpt-13b --hardware rtx4080+990pro+64GB --max-size
      spillway plan ./llama-8b --sweep host-memory --chart curve.png
      spillway plan ./llama-8b --chart step.png
      spillway plan --config run.yaml
    """
    from spillway.planning.question import ask, with_batch_tokens
    from spillway.report.progress import Reporter

    reporter = Reporter()
    if max_size and (sweep is not None or chart is not None):
        raise UsageError("--max-size is one number: leave --sweep and --chart out, or ask for them by themselves")
    if batch_tokens is not None and ParameterSource.COMMANDLINE in map(context.get_parameter_source, _ROWS):
        raise UsageError(
            "--batch-tokens chooses --per-device-train-batch-size and --gradient-accumulation-steps: give it or them"
        )
    here = [name for name in ("store", "device") if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if hardware is not None and here:
        raise UsageError(f"--{here[0]} is of this machine, and --hardware asks about another: give one of them")
    if chart is not None:
        check_picture(Path(chart), PICTURES if sweep is not None else (".json", *PICTURES))
    stores = tuple(values.pop("store")) or (".",)
    options = TrainOptions(model=model, data=data, output_dir="", store=stores, **values)
    if hardware is None:
        reporter.say("measuring this machine (or taking what was measured before)")
    question = ask(options, hardware, reporter)
    if batch_tokens is not None:
        with reporter.counting("choosing rows at a time"):
            question = with_batch_tokens(question, batch_tokens)
    if max_size:
        _say_largest(question, reporter, as_json)
    elif sweep is not None:
        _say_sweep(question, sweep, chart, reporter, as_json)
    else:
        _say_answer(question, chart, reporter, as_json)


def _say_largest(question: "Question", reporter: "Reporter", as_json: bool) -> None:
    from spillway.planning.curves import largest, plan_of_blocks

    with reporter.counting("searching"):
        layers, params = largest(question)
        plan = plan_of_blocks(question, layers)
    if as_json:
        found = {"layers": layers, "params": params, "step_seconds": plan.step_seconds, "notes": plan.notes}
        click.echo(json.dumps(found))
        return
    reporter.say(
        f"{params / 1e9:.1f}B parameters: {layers} blocks of this width fit {question.machine.name}, "
        f"{format_seconds(plan.step_seconds)} a step"
    )
    for note in plan.notes:
        reporter.say(f"note: {as_flags(note)}")


def _say_sweep(question: "Question", axis: str, chart: str | None, reporter: "Reporter", as_json: bool) -> None:
    from spillway.planning.curves import sweep
    from spillway.report.chart import draw_sweep
    from spillway.report.plans import print_sweep
    from spillway.report.progress import answers

    with reporter.counting("planning"):
        points = sweep(question, axis)
    if chart is not None:
        draw_sweep(Path(chart), points, f"{question.options.model} on {question.machine.name}")
        reporter.say(f"the curve is in {chart}")
    if as_json:
        click.echo(json.dumps([{"at": at, "report": to_json(report)} for at, report in points]))
    else:
        print_sweep(answers(), points)


def _say_answer(question: "Question", chart: str | None, reporter: "Reporter", as_json: bool) -> None:
    from spillway.planning.answer import answer
    from spillway.planning.curves import largest_as_help
    from spillway.report.plans import print_report
    from spillway.report.progress import answers
    from spillway.spec.errors import PlanInfeasible

    with reporter.counting("planning"):
        report = answer(question)
        if not report.fits:
            report = replace(report, helps=(*report.helps, *largest_as_help(question)))
    if chart is not None and report.fits:
        _draw(question, Path(chart), reporter)
    if as_json:
        click.echo(json.dumps(to_json(report)))
        if not report.fits:
            raise click.exceptions.Exit(PlanInfeasible.exit_code)  # the report says why
        return
    print_report(answers(), report)
    if not report.fits:
        raise PlanInfeasible(report.problem, report.peaks)


def _draw(question: "Question", path: Path, reporter: "Reporter") -> None:
    from spillway.planning.figures import picture
    from spillway.report.chart import draw_step
    from spillway.report.chrome import write_chrome_trace
    from spillway.spec.sizes import format_size

    step = picture(question)
    if path.suffix in PICTURES:
        draw_step(path, step.trace, step.memory, f"{question.options.model} on {question.machine.name}")
    else:
        write_chrome_trace(path, {"predicted": step.trace}, step.unit_names, step.memory)
    reporter.say(f"the predicted step is in {path} ({format_size(path.stat().st_size)})")


@click.command("probe")
@click.option("--store", multiple=True, metavar="PATH", help="Directory on a drive to measure; again for more.")
@click.option("--json", "as_json", is_flag=True, help="As JSON on standard output.")
def probe_command(store: tuple[str, ...], as_json: bool) -> None:
    """Measure this machine: device, links, drives, optimizer. Takes seconds; `plan` uses it for a day.

    \b
    Example:
      spillway probe --store /mnt/nvme0 --store /mnt/nvme1
    """
    from spillway.hardware.machine import this_machine
    from spillway.hardware.others import Others
    from spillway.report.plans import print_machine
    from spillway.report.progress import Reporter, answers

    paths = tuple(map(Path, store or (".",)))
    for path in paths:
        if not path.exists():
            Reporter().say(f"note: {path} is not there (is its drive mounted?): the drive it would lie on counts")
    others = Others()
    machine = this_machine(paths, refresh=True)
    if others.disturb:
        Reporter().say(
            f"note: other programs used {others.share:.0%} of the processor meanwhile: what was measured is kept for "
            f"ten minutes, not for a day"
        )
    if as_json:
        click.echo(json.dumps(to_json(machine)))
    else:
        print_machine(answers(), machine)


@click.command("doctor")
@click.option("--store", multiple=True, metavar="PATH", help="Store path to look at; again for more.")
@click.option("--json", "as_json", is_flag=True, help="As JSON on standard output.")
def doctor_command(store: tuple[str, ...], as_json: bool) -> None:
    """What this machine has, what is missing or slow, and how to mend it."""
    from spillway.hardware.doctor import examine
    from spillway.report.plans import print_findings
    from spillway.report.progress import answers

    findings = examine(tuple(map(Path, store or (".",))))
    if as_json:
        click.echo(json.dumps(to_json(findings)))
    else:
        print_findings(answers(), findings)
