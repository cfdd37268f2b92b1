"""`spillway train`."""

import json
import os
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from spillway.cli.options import add_options, config_option
from spillway.cli.stopped import end_at_once
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions

_ORIGINS = {ParameterSource.COMMANDLINE: "flag", ParameterSource.DEFAULT_MAP: "file"}


def _show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        for parameter in context.command.params:
            if isinstance(parameter, click.Option):
                parameter.hidden = False
        click.echo(context.get_help())
        context.exit()


def _let_segments_grow() -> None:
    """Of PyTorch's allocator on a GPU, unless the user says otherwise: what is freed in one size then serves others,
    and what it holds stays near what is used. To be said before PyTorch is imported."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@click.command("train")
@click.argument("model")
@click.argument("data", nargs=-1, required=True)
@add_options(TrainOptions)
@config_option(TrainOptions)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on standard output.")
@click.option("--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Every option.")
@click.pass_context
def train_command(context: click.Context, /, as_json: bool, **values: Any) -> None:
    """Fine-tune MODEL (a directory or a hub name) on DATA (.txt, .jsonl, .json, .parquet, or directories of them).

    \b
    What a record is shows in its fields:
      {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}   assistant turns are trained
      {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}     the same (ShareGPT)
      {"prompt": ..., "completion": ...}                                             the completion is trained
      {"instruction": ..., "input": ..., "output": ...}                              the output is trained (Alpaca)
      {"text": ...}, or a .txt file                                                  everything is trained

    \b
    Examples:
      spillway train ./llama-8b chats.jsonl -o runs/a
      spillway train ./llama-8b chats.jsonl -o runs/a --device-memory 20GB --host-memory 48GB
      spillway train ./llama-8b books/ -o runs/b --store /mnt/nvme0 --store /mnt/nvme1 --max-steps 500
      spillway train --config run.yaml

    Run the same command again to go on after an interruption.
    """
    _let_segments_grow()
    from spillway.report.progress import Reporter
    from spillway.training.run import train

    origins = {
        name: _ORIGINS.get(source, "default") for name in values if (source := context.get_parameter_source(name))
    }
    options = TrainOptions(**{**values, "store": tuple(values["store"]), "data": tuple(values["data"])})
    summary = train(options, Reporter(), origins, partial(end_at_once, as_json))
    if as_json:
        click.echo(json.dumps(to_json(summary)))
