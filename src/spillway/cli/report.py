"""`spillway report`."""

import json
from pathlib import Path

import click

from spillway.cli.pictures import PICTURES, check_picture


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--chart", metavar="FILE", help="Losses, gradient norms, speed and lanes as a .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on standard output.")
def report_command(runs: tuple[str, ...], chart: str | None, as_json: bool) -> None:
    """What a run has done so far: loss, pace, memory and bytes, beside what was planned. Also while it trains.

    Several runs stand beside each other. Where a step's time goes, operation by operation, is in RUN/trace.json (open
    it in ui.perfetto.dev).

    \b
    Examples:
      spillway report runs/a
      spillway report runs/a runs/b --chart compared.png
    """
    from spillway.report.chart import draw_runs
    from spillway.report.progress import Reporter, answers
    from spillway.report.runs import print_runs, report_of
    from spillway.rundir import read_options, read_plan, read_steps, written_bytes
    from spillway.spec.jsonable import to_json

    if chart is not None:
        check_picture(Path(chart), PICTURES)
    directories = {run: Path(run) for run in runs}
    options = {run: read_options(directory) for run, directory in directories.items()}
    steps = {run: read_steps(directory) for run, directory in directories.items()}
    reports = [
        report_of(run, options[run], read_plan(directory), steps[run], written_bytes(directory))
        for run, directory in directories.items()
    ]
    reporter = Reporter()
    if chart is not None:
        draw_runs(Path(chart), steps, {report.run: report.busy_share for report in reports})
        reporter.say(f"the picture is in {chart}")
    if as_json:
        click.echo(json.dumps(to_json(reports)))
    else:
        print_runs(answers(), reports)
