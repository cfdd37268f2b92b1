"""trace.json: a measured step and its prediction, for Perfetto or chrome://tracing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spillway.spec.plan import LANES
from spillway.spec.trace import Trace


def write_chrome_trace(
    path: Path,
    traces: dict[str, Trace],
    unit_names: list[str],
    memory: dict[str, list[tuple[float, int]]] | None = None,
) -> None:
    """One process per trace, one thread per lane; `memory` (per tier: seconds, and bytes from then on) as counters of
    the first. Times in microseconds, as the format wants."""
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for number, event in enumerate(_events(traces, unit_names, memory or {})):
            file.write(",\n" if number else "\n")
            json.dump(event, file)
        file.write("\n]}\n")


def _events(
    traces: dict[str, Trace], unit_names: list[str], memory: dict[str, list[tuple[float, int]]]
) -> Iterator[dict[str, Any]]:
    """One by one: all of them would take memory that a run has no more."""
    for tier, points in memory.items():
        for at, size in points:
            yield {"ph": "C", "pid": 0, "name": f"{tier} memory", "ts": 1e6 * at, "args": {"bytes": size}}
    for process, (name, trace) in enumerate(traces.items()):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
        for thread, lane in enumerate(LANES):
            labels = {"ph": "M", "pid": process, "tid": thread}
            yield {**labels, "name": "thread_name", "args": {"name": lane}}
            yield {**labels, "name": "thread_sort_index", "args": {"sort_index": thread}}
        for span in trace.spans:
            unit = unit_names[span.unit] if span.unit >= 0 else "step"
            yield {
                "ph": "X",
                "pid": process,
                "tid": LANES.index(span.lane),
                "name": f"{span.kind} {span.group if span.group != 'none' else ''} {unit}".replace("  ", " "),
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"op": span.op, "amount": span.amount},
            }
