"""metrics.jsonl: a line per optimizer step."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway.durable import write_whole
from spillway.spec.jsonable import to_json
from spillway.spec.trace import Trace

_CUT_OFF = 1 << 62  # the step of a line that a crash cut off: after all others


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step. Seconds and bytes; `loss` is the mean over the step's trained tokens, `tokens` counts no
    padding."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    trained_tokens: int
    seconds: float
    busy_seconds: dict[str, float]
    moved_bytes: dict[str, float]
    peak_bytes: dict[str, int]
    written_bytes: dict[str, int]  # to each path by this run so far, resumed parts included
    skipped_steps: int = 0  # batches passed over so far, since this start of the run
    eval_loss: float | None = None  # of held-out data, after this step, where it was evaluated
    total_steps: int = 0  # that the run is to make, as it was then asked for


class MetricsFile:
    """Appends steps; after a resume the lines of steps that were lost are gone."""

    def __init__(self, path: Path, first_step: int, last: dict[str, Any] | None = None) -> None:
        """`first_step`: steps up to and including it stay. `last`: what the saved point knows of that step, for a run
        that was killed after the step was committed and before its line was written."""
        kept = [line for line in _lines(path) if _step_of(line) <= first_step]
        if last is not None and (not kept or _step_of(kept[-1]) < first_step):
            kept.append(json.dumps({"step": first_step, **last}))
        write_whole(path, "".join(line + "\n" for line in kept))
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._pending = b""  # lines that there was no room for

    def add(self, metrics: StepMetrics) -> OSError | None:
        """Write one line and let it reach the system. What went wrong, where something did: the line is written with
        the next one then, for training does not end for want of it."""
        self._pending += (json.dumps(to_json(metrics)) + "\n").encode()
        return self._write()

    def _write(self) -> OSError | None:
        whole, left = os.fstat(self._file.fileno()).st_size, self._pending
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), whole)
            return error
        self._pending = b""
        return None

    def close(self) -> None:
        """Close the file, with what waits written, if there is room now."""
        self._write()
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, one for each step; none where there is no such file. A line that a crash cut off
    ends them, and that of a step whose run was killed between its commit and its line has few fields."""
    rows = []
    for line in _lines(path):
        if _step_of(line) == _CUT_OFF:
            break
        rows.append(json.loads(line))
    return rows


def sum_lanes(traces: Sequence[Trace]) -> tuple[dict[str, float], dict[str, float]]:
    """Busy seconds and moved bytes per lane over the traces of one optimizer step."""
    busy: dict[str, float] = {}
    moved: dict[str, float] = {}
    for trace in traces:
        for total, part in ((busy, trace.busy_s()), (moved, trace.moved_bytes())):
            for lane, amount in part.items():
                total[lane] = round(total.get(lane, 0.0) + amount, 6)
    return busy, moved


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return _CUT_OFF


def larger_of(some: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    """Of two countings up, by name, the later ones."""
    return {name: max(some.get(name, 0), others.get(name, 0)) for name in (*some, *others)}
