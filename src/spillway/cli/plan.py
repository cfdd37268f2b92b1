"""`spillway plan`, `spillway probe`, `spillway doctor`."""

import json
from pathlib import Path
from typing import Any

import click

from spillway.cli.options import add_options
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions

_KEPT = (
    "store", "device_memory", "host_memory", "disk_memory", "max_length", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_steps", "num_train_epochs", "optim", "master_bits", "max_grad_norm", "dtype",
    "update", "activations", "weights", "states", "policy", "save_total_limit",
)  # fmt: skip


@click.command("plan")
@click.argument("model")
@click.argument("data", nargs=-1)
@add_options(TrainOptions, _KEPT)
@click.option("--hardware", metavar="H", help="A name, parts such as rtx4090+4x990pro+128GB, or a TOML file.")
@click.option("--max-size", is_flag=True, help="The largest model of this width that can be trained.")
@click.option("--sweep", metavar="AXIS", help="A curve over batch, drives or host-memory.")
@click.option("--chart", metavar="FILE", help="The predicted step, for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON on standard output.")
def plan_command(
    model: str,
    data: tuple[str, ...],
    hardware: str | None,
    max_size: bool,
    sweep: str | None,
    chart: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Will MODEL fit, how fast will it train, and what would help; on this machine or any other.

    Needs only the model's config.json; the papers' shapes go by name (gpt-13b, gpt-175b). With DATA the length of the
    run is counted.

    \b
    Examples:
      spillway plan ./llama-8b
      spillway plan ./llama-8b chats.jsonl --hardware rtx4090+2x990pro+64GB
      spillway plan gpt-13b --hardware lohan-4090 --per-device-train-batch-size 32 --max-length 1024
      spillway plan gpt-13b --hardware rtx4080+990pro+64GB --max-size
      spillway plan ./llama-8b --sweep host-memory
    """
    from spillway import planning
    from spillway.hardware.catalogue import find_machine
    from spillway.hardware.machine import this_machine
    from spillway.report.chrome import write_chrome_trace
    from spillway.report.plans import print_report, print_sweep
    from spillway.report.progress import Reporter
    from spillway.spec.sizes import format_size
    from spillway.store.disk import even_geometry, free_on

    reporter = Reporter()
    stores = tuple(values.pop("store")) or (".",)
    options = TrainOptions(model=model, data=data, output_dir="", store=stores, **values)
    options.check()
    paths = tuple(map(Path, stores))
    if hardware is None:
        reporter.say("measuring this machine (or taking what was measured before)")
        machine = this_machine(paths, free_on(even_geometry(paths)))
    else:
        machine = find_machine(hardware)
    steps = planning.count_steps(options, reporter)
    question = planning.Question(options, machine, hardware is None, steps)
    if max_size:
        with reporter.counting("searching"):
            layers, params = planning.largest(question, lambda _: None)
        found = {"layers": layers, "params": params}
        text = f"{params / 1e9:.1f}B parameters: {layers} blocks of this width fit {machine.name}"
        click.echo(json.dumps(found)) if as_json else reporter.say(text)
        return
    if sweep is not None:
        points = planning.sweep(question, sweep)
        if as_json:
            click.echo(json.dumps([{"at": at, "report": to_json(report)} for at, report in points]))
        else:
            print_sweep(reporter.console, points)
        return
    report = planning.answer(question)
    if chart is not None and report.fits:
        trace, names = planning.trace_of(question)
        write_chrome_trace(Path(chart), {"predicted": trace}, names)
    if as_json:
        click.echo(json.dumps(to_json(report)))
    else:
        print_report(reporter.console, report)
    if not report.fits:
        from spillway.spec.errors import PlanInfeasible

        raise PlanInfeasible(report.problem, report.peaks)
    if chart is not None:
        reporter.say(f"the predicted step is in {chart} ({format_size(Path(chart).stat().st_size)})")


@click.command("probe")
@click.option("--store", multiple=True, metavar="PATH", help="Directory on a drive to measure; again for more.")
@click.option("--json", "as_json", is_flag=True, help="As JSON on standard output.")
def probe_command(store: tuple[str, ...], as_json: bool) -> None:
    """Measure this machine: device, links, drives, optimizer. Takes seconds; `plan` uses it for a week.

    \b
    Example:
      spillway probe --store /mnt/nvme0 --store /mnt/nvme1
    """
    from spillway.hardware.machine import this_machine
    from spillway.report.plans import print_machine
    from spillway.report.progress import Reporter
    from spillway.store.disk import even_geometry, free_on

    paths = tuple(map(Path, store or (".",)))
    machine = this_machine(paths, free_on(even_geometry(paths)), refresh=True)
    if as_json:
        click.echo(json.dumps(to_json(machine)))
    else:
        print_machine(Reporter().console, machine)


@click.command("doctor")
@click.option("--store", multiple=True, metavar="PATH", help="Store path to look at; again for more.")
@click.option("--json", "as_json", is_flag=True, help="As JSON on standard output.")
def doctor_command(store: tuple[str, ...], as_json: bool) -> None:
    """What this machine has, what is missing or slow, and how to mend it."""
    from spillway.hardware.doctor import examine
    from spillway.report.plans import print_findings
    from spillway.report.progress import Reporter

    findings = examine(tuple(map(Path, store or (".",))))
    if as_json:
        click.echo(json.dumps(to_json(findings)))
    else:
        print_findings(Reporter().console, findings)
