"""The predicted step as a picture: what every lane does, and what memory it takes."""

from pathlib import Path

from spillway.spec.errors import UsageError
from spillway.spec.plan import LANES
from spillway.spec.trace import Trace

_COLOURS = {"weight": "tab:blue", "grad": "tab:orange", "state": "tab:green", "act": "tab:purple", "none": "tab:gray"}


def draw_step(path: Path, trace: Trace, curves: dict[str, list[tuple[float, int]]], title: str) -> None:
    """A PNG (or whatever the suffix says). Raises UsageError where matplotlib is not installed."""
    try:
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UsageError(
            f"drawing {path} needs matplotlib: pip install matplotlib, or give a name ending in .json"
        ) from error
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
