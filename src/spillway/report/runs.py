"""What runs did, from what they left in their directories; several beside each other."""

import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from spillway.report.metrics import larger_of
from spillway.spec.answers import RunReport
from spillway.spec.options import TrainOptions
from spillway.spec.sizes import format_seconds, format_size

_RECENT = 10  # steps whose mean loss is shown as that of now
_SLOW = 0.95  # of all steps are faster than the slow one

Rows = list[dict[str, Any]]


def report_of(run: str, options: TrainOptions, plan: dict[str, Any], rows: Rows, written: dict[str, int]) -> RunReport:
    """Of one run, from its options, its plan.json and its metrics (at least one step). `written`: bytes to each path,
    as the run noted them at its end."""
    timed = [row for row in rows if "seconds" in row]  # a step whose line was written after a crash has no times
    usual = timed[1:] or timed  # the first finds everything cold
    seconds = sorted(row["seconds"] for row in usual) or [0.0]
    step_seconds, spent = statistics.median(seconds), sum(row["seconds"] for row in timed)
    held_out = [row["eval_loss"] for row in timed if row["eval_loss"] is not None]
    recent = [row["loss"] for row in rows[-_RECENT:]]
    last = timed[-1] if timed else {}
    steps, total = rows[-1]["step"], last.get("total_steps", 0)
    tokens = statistics.median(row["tokens"] for row in usual) if usual else 0
    return RunReport(
        run=run,
        model=options.model,
        optim=options.optim,
        update=str(plan["placement"]["update"]),
        steps=steps,
        total_steps=total,
        skipped_steps=last.get("skipped_steps", 0),
        first_loss=rows[0]["loss"],
        recent_loss=statistics.fmean(recent),
        recent_steps=len(recent),
        held_out=(held_out[0], held_out[-1]) if held_out else None,
        tokens=sum(row["tokens"] for row in timed),
        tokens_per_s=tokens / step_seconds if step_seconds else 0.0,
        step_seconds=step_seconds,
        slow_step_seconds=seconds[min(int(_SLOW * len(seconds)), len(seconds) - 1)],
        predicted_step_seconds=plan["step_seconds"],
        predicted_clipped_step_seconds=plan["wary_step_seconds"],
        seconds=spent,
        seconds_left=max(total - steps, 0) * step_seconds,
        busy_share=_busy_share(usual),
        read_bytes=_median_moved(usual, "read"),
        written_bytes=_median_moved(usual, "write"),
        written_in_all=larger_of(last.get("written_bytes", {}), written),
        peaks={tier: max(row["peak_bytes"][tier] for row in timed) for tier in last.get("peak_bytes", {})},
        predicted_peaks=dict(plan["peaks"]),
    )


def print_runs(console: Console, reports: list[RunReport]) -> None:
    """A column for each run."""
    table = Table("", *(report.run for report in reports))
    for label, cells in _lines(reports):
        if any(cells):
            table.add_row(label, *cells)
    console.print(table)


def _lines(reports: list[RunReport]) -> list[tuple[str, list[str]]]:
    makers: dict[str, Callable[[RunReport], str]] = {
        "model": lambda run: run.model,
        "optimizer, update": lambda run: f"{run.optim}, {run.update}",
        "steps": _steps,
        "passed over": lambda run: f"{run.skipped_steps} batches" if run.skipped_steps else "",
        "time": _time,
        "loss": lambda run: f"{run.first_loss:.4f} -> {run.recent_loss:.4f} (mean of the last {run.recent_steps})",
        "held-out loss": lambda run: f"{run.held_out[0]:.4f} -> {run.held_out[1]:.4f}" if run.held_out else "",
        "a step": _pace,
        "predicted": _predicted,
        "tokens per second": lambda run: f"{run.tokens_per_s:,.0f}",
        "tokens": lambda run: f"{run.tokens:,}",
        "lanes busy": lambda run: ", ".join(f"{lane} {share:.0%}" for lane, share in run.busy_share.items()),
        "read, written a step": lambda run: f"{format_size(run.read_bytes)}, {format_size(run.written_bytes)}",
        "written": _written,
        "device peak": lambda run: _peak(run, "device"),
        "host peak": lambda run: _peak(run, "host"),
        "disk peak": lambda run: _peak(run, "disk"),
    }
    return [(label, [make(report) for report in reports]) for label, make in makers.items()]


def _steps(run: RunReport) -> str:
    return f"{run.steps:,} of {run.total_steps:,}" if run.total_steps else f"{run.steps:,}"


def _time(run: RunReport) -> str:
    left = f", {format_seconds(run.seconds_left)} left" if run.seconds_left else ""
    return f"{format_seconds(run.seconds)}{left}"


def _pace(run: RunReport) -> str:
    return f"{format_seconds(run.step_seconds)}, one in twenty {format_seconds(run.slow_step_seconds)} or more"


def _predicted(run: RunReport) -> str:
    clipped = run.predicted_clipped_step_seconds
    slower = f", {format_seconds(clipped)} where gradients are clipped" if clipped else ""
    return f"{format_seconds(run.predicted_step_seconds)}{slower}"


def _written(run: RunReport) -> str:
    return "\n".join(f"{format_size(size)} to {path}" for path, size in run.written_in_all.items())


def _peak(run: RunReport, tier: str) -> str:
    measured, predicted = run.peaks.get(tier, 0), run.predicted_peaks.get(tier, 0)
    return f"{format_size(measured)} ({format_size(predicted)} planned)" if measured else ""


def _busy_share(rows: Rows) -> dict[str, float]:
    """Of all steps' time, the busiest lane first."""
    spent = sum(row["seconds"] for row in rows)
    lanes = {lane for row in rows for lane in row["busy_seconds"]}
    shares = {lane: sum(row["busy_seconds"].get(lane, 0.0) for row in rows) / spent for lane in lanes}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _median_moved(rows: Rows, lane: str) -> float:
    return statistics.median([row["moved_bytes"].get(lane, 0.0) for row in rows] or [0.0])
