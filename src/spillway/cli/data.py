"""`spillway data`: what will be trained, before it is."""

import json
from typing import Any

import click

from spillway.spec.sizes import counted


@click.command("data")
@click.argument("data", nargs=-1, required=True)
@click.option("--model", required=True, help="Model whose tokenizer and chat template are used.")
@click.option("--max-length", type=click.IntRange(2), default=2048, show_default=True, help="Tokens per row.")
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="How many samples to show.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON on standard output.")
def data_command(data: tuple[str, ...], model: str, max_length: int, samples: int, as_json: bool) -> None:
    """Show samples of DATA with the trained tokens marked, and the counts. Errors name file and line.

    \b
    Example:
      spillway data chats.jsonl --model ./llama-8b
    """
    from spillway.integrations.huggingface import find_directory, fitting_length
    from spillway.report.progress import Reporter
    from spillway.rows import RowMaker

    reporter = Reporter()
    directory = find_directory(model)
    rows = RowMaker.of(directory, fitting_length(directory, max_length))
    with reporter.counting("reading data") as counter:
        encoded = rows.read(data, counter.reach)
    lengths = sorted(sample.ids.size for sample in encoded.samples)
    counts = {
        "records": encoded.num_records,
        "samples": len(encoded.samples),
        "tokens": encoded.num_tokens,
        "trained_tokens": encoded.num_trained,
        "truncated": encoded.num_truncated,
        "truncated_tokens": encoded.lost_tokens,
        "samples_lost_to_truncation": encoded.num_lost,
        "median_length": lengths[len(lengths) // 2],
        "longest": lengths[-1],
    }
    if as_json:
        click.echo(json.dumps(counts))
        return
    for sample in encoded.samples[:samples]:
        click.echo(
            click.style(
                f"--- {sample.where} · {counted(sample.ids.size, 'token')}, {int(sample.trained.sum())} trained",
                bold=True,
            )
        )
        click.echo(_marked(sample, rows.tokenizer))
    share = encoded.num_trained / encoded.num_tokens
    click.echo(
        f"{counted(counts['records'], 'record')}, {counted(counts['samples'], 'sample')}, "
        f"{counted(counts['tokens'], 'token')}: {share:.0%} trained, "
        f"{counts['truncated']} cut at {rows.length} ({counted(counts['truncated_tokens'], 'token')} lost, "
        f"{counted(counts['samples_lost_to_truncation'], 'sample')} with nothing left), "
        f"median {counts['median_length']}, longest {counts['longest']}"
    )


def _marked(sample: Any, tokenizer: Any) -> str:
    """The text with trained stretches green on a terminal and between «» everywhere."""
    parts = []
    start = 0
    for place in range(1, sample.ids.size + 1):
        if place == sample.ids.size or sample.trained[place] != sample.trained[start]:
            text = tokenizer.decode(sample.ids[start:place].tolist())
            parts.append(click.style(f"«{text}»", fg="green") if sample.trained[start] else text)
            start = place
    return "".join(parts)
