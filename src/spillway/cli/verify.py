"""`spillway verify`."""

import json
from pathlib import Path

import click


@click.command("verify")
@click.argument("run")
@click.option(
    "--against-resident", "steps", type=click.IntRange(1), metavar="N", help="Also train N steps beside plain PyTorch."
)
@click.option("--layers", type=int, help="Use only the first N blocks. Default: as many as plain PyTorch has room for.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON on standard output.")
def verify_command(run: str, steps: int | None, layers: int | None, as_json: bool) -> None:
    """Check every byte of the saved points of RUN against its checksum.

    With --against-resident N, train N steps of the run's model on its data twice, streamed and wholly in memory by
    plain PyTorch, and show the largest difference in loss and weights.

    \b
    Examples:
      spillway verify runs/a
      spillway verify runs/a --against-resident 5
      spillway verify runs/a --against-resident 5 --layers 4
    """
    from spillway.report.progress import Reporter
    from spillway.spec.errors import DiskError, UsageError
    from spillway.spec.jsonable import to_json
    from spillway.spec.sizes import format_size
    from spillway.verify import has_points, verify_against_resident, verify_points

    if layers is not None and steps is None:
        raise UsageError("--layers is for --against-resident, which is not asked for")
    reporter = Reporter()
    # Steps beside plain PyTorch need no saved point.
    points = verify_points(Path(run), reporter) if steps is None or has_points(Path(run)) else []
    for point in points:
        if not point.problem:
            reporter.say(f"step {point.step}: {format_size(point.num_bytes)}, every byte as it was written")
    result: dict[str, object] = {"points": to_json(points)}
    if steps is not None:
        found = verify_against_resident(Path(run), steps, layers, reporter)
        result["against_resident"] = to_json(found)
        reporter.say(
            f"{steps} steps streamed and in plain PyTorch{f', first {found.layers} blocks' if found.layers else ''}: "
            f"losses differ by {found.largest_loss_difference:.2g} at most (relative), weights by "
            f"{found.largest_weight_difference:.2g} (the largest weight is {found.largest_weight:.2g})"
        )
    damaged = "; ".join(point.problem for point in points if point.problem)
    if as_json:
        failure = {"error": damaged, "exit_code": DiskError.exit_code} if damaged else {}
        click.echo(json.dumps({**result, **failure}))
    if damaged and as_json:
        click.echo(f"spillway: {damaged}", err=True)
        raise click.exceptions.Exit(DiskError.exit_code)
    if damaged:
        raise DiskError(damaged)
