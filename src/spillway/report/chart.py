"""Pictures: a step, what every lane does and what memory it takes; curves of predictions; what runs did."""

from pathlib import Path
from typing import Any

from spillway.spec.answers import PlanReport
from spillway.spec.errors import UsageError
from spillway.spec.plan import LANES
from spillway.spec.trace import Trace

_COLOURS = {"weight": "tab:blue", "grad": "tab:orange", "state": "tab:green", "act": "tab:purple", "none": "tab:gray"}


def draw_step(path: Path, trace: Trace, curves: dict[str, list[tuple[float, int]]], title: str) -> None:
    """A PNG (or whatever the suffix says). Raises UsageError where matplotlib is not installed."""
    pyplot = _pyplot(path)
    from matplotlib.patches import Patch

    lanes = [lane for lane in LANES if any(span.lane == lane for span in trace.spans)]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(12, 7), sharex=True, height_ratios=(2, 1))
    for row, lane in enumerate(lanes):
        for group, colour in _COLOURS.items():
            bars = [
                (span.start_s, span.end_s - span.start_s)
                for span in trace.spans
                if span.lane == lane and span.group == group
            ]
            top.broken_barh(bars, (row - 0.4, 0.8), color=colour)
    top.set_yticks(range(len(lanes)), lanes)
    top.invert_yaxis()
    top.set_title(title)
    top.legend(handles=[Patch(color=colour, label=group) for group, colour in _COLOURS.items()], loc="upper right")
    for tier, points in curves.items():
        bottom.step([at for at, _ in points], [size / 1e9 for _, size in points], where="post", label=tier)
    bottom.set_ylabel("GB")
    bottom.set_xlabel("seconds")
    bottom.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_sweep(path: Path, points: list[tuple[str, PlanReport]], title: str) -> None:
    """Tokens per second along the axis, with the bottleneck of each point; what does not fit has none. Raises
    UsageError where matplotlib is not installed."""
    pyplot = _pyplot(path)
    figure, panel = pyplot.subplots(figsize=(9, 5))
    fitting = [(place, report) for place, (_, report) in enumerate(points) if report.fits]
    panel.plot([place for place, _ in fitting], [report.tokens_per_s for _, report in fitting], marker="o")
    for place, report in fitting:
        at = (place, report.tokens_per_s)
        panel.annotate(report.bottleneck, at, textcoords="offset points", xytext=(0, 8), ha="center", fontsize=9)
    panel.set_xticks(range(len(points)), [at if report.fits else f"{at}\ndoes not fit" for at, report in points])
    panel.margins(y=0.15)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("tokens per second")
    panel.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_runs(path: Path, runs: dict[str, list[dict[str, Any]]], busy: dict[str, dict[str, float]]) -> None:
    """By step: loss (and that of held-out data), gradient norm, tokens per second; and how busy each lane was. `runs`:
    the metrics of each; `busy`: per run and lane, a share. Raises UsageError where matplotlib is not installed."""
    pyplot = _pyplot(path)
    figure, ((loss, norm), (speed, lanes)) = pyplot.subplots(2, 2, figsize=(12, 7))
    for place, (name, rows) in enumerate(runs.items()):
        timed = [row for row in rows if "seconds" in row]
        steps = [row["step"] for row in timed]
        (line,) = loss.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=name, linewidth=1)
        held_out = [(row["step"], row["eval_loss"]) for row in timed if row["eval_loss"] is not None]
        if held_out:
            label = f"{name}, held-out data"
            loss.plot(*zip(*held_out, strict=True), marker="o", linestyle="--", color=line.get_color(), label=label)
        norm.plot(steps, [row["grad_norm"] for row in timed], color=line.get_color(), linewidth=1)
        pace = [row["tokens"] / row["seconds"] for row in timed]
        speed.plot(steps, pace, color=line.get_color(), linewidth=1)
        used = [lane for lane in LANES if lane in busy[name]]
        heights = [100 * busy[name][lane] for lane in used]
        width = 0.8 / len(runs)
        at = [LANES.index(lane) - 0.4 + (place + 0.5) * width for lane in used]
        lanes.bar(at, heights, width, color=line.get_color())
    lanes.set_xticks(range(len(LANES)), LANES)
    norm.set_yscale("log")
    speed.set_ylim(bottom=0)
    lanes.set_ylim(0, 100)
    titles = ("loss", "gradient norm", "tokens per second", "lanes busy, %")
    for panel, title in zip((loss, norm, speed, lanes), titles, strict=True):
        panel.set_title(title)
    for panel in (norm, speed):
        panel.set_xlabel("step")
    loss.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot(path: Path) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError(
            f"drawing {path} needs matplotlib: pip install matplotlib, or leave the picture out"
        ) from error
    return pyplot
