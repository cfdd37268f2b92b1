"""`spillway export`."""

import json
from pathlib import Path

import click


@click.command("export")
@click.argument("run")
@click.argument("directory")
@click.option("--dtype", help="bfloat16, float16 or float32. Default: what the run computes in.")
@click.option("--step", type=int, help="Which saved point. Default: the newest.")
@click.option("--overwrite", is_flag=True, help="Overwrite a model that is already in DIRECTORY.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON on standard output.")
def export_command(
    run: str, directory: str, dtype: str | None, step: int | None, overwrite: bool, as_json: bool
) -> None:
    """Write a saved point of RUN as a Hugging Face model to DIRECTORY, with config and tokenizer.

    Streams: needs memory for a window, not for the model. Not while the run is training.

    \b
    Examples:
      spillway export runs/a out
      spillway export runs/a out-fp32 --dtype float32      every bit of the fp32 masters
      spillway export runs/a out-900 --step 900
    """
    from spillway.export import export
    from spillway.report.progress import Reporter
    from spillway.spec.jsonable import to_json
    from spillway.spec.sizes import format_size

    reporter = Reporter()
    done = export(Path(run), Path(directory), dtype, step, reporter, overwrite)
    if as_json:
        click.echo(json.dumps(to_json(done)))
    else:
        reporter.say(f"step {done.step} is in {done.output} ({done.dtype}, {format_size(done.num_bytes)})")
