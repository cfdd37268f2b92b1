"""Figures of a run from its metrics, by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spillway.report.metrics import StepMetrics, read_metrics
from spillway.report.runs import print_runs, report_of
from spillway.spec.answers import RunReport
from spillway.spec.jsonable import to_json
from spillway.spec.options import TrainOptions

PLAN = {
    "placement": {"update": "deferred"},
    "step_seconds": 1.5,
    "wary_step_seconds": 1.75,
    "peaks": {"device": 10, "host": 200, "disk": 3000},
}


def step(number: int, seconds: float, **changes: Any) -> dict[str, Any]:
    busy, moved = {"read": seconds / 2, "compute": seconds / 4}, {"read": 100.0, "write": 50.0}
    peaks, written = {"device": 0, "host": 100 + number, "disk": 3000}, {"/drive": 50 * number}
    loss = 10.0 - number
    metrics = StepMetrics(number, 0, loss, 1.0, 1e-3, 40, 30, seconds, busy, moved, peaks, written, total_steps=20)
    return to_json(replace(metrics, **changes))


def report(rows: list[dict[str, Any]]) -> RunReport:
    return report_of("runs/a", TrainOptions("llama", ("data",), "runs/a"), PLAN, rows, {})


def test_the_cold_first_step_counts_in_the_time_and_not_in_the_pace() -> None:
    found = report([step(1, 9.0), step(2, 2.0), step(3, 2.0), step(4, 4.0)])
    assert (found.steps, found.total_steps, found.tokens, found.seconds) == (4, 20, 160, 17.0)
    assert (found.step_seconds, found.slow_step_seconds, found.tokens_per_s) == (2.0, 4.0, 20.0)
    assert found.seconds_left == 16 * 2.0
    assert found.busy_share == {"read": 0.5, "compute": 0.25}
    assert (found.read_bytes, found.written_bytes, found.written_in_all) == (100.0, 50.0, {"/drive": 200})
    assert (found.peaks["host"], found.predicted_peaks["host"]) == (104, 200)
    assert (found.predicted_step_seconds, found.predicted_clipped_step_seconds) == (1.5, 1.75)


def test_the_loss_of_now_is_the_mean_of_the_last_ten() -> None:
    found = report([step(number, 1.0) for number in range(1, 16)])
    assert (found.first_loss, found.recent_loss, found.recent_steps) == (9.0, sum(range(-5, 5)) / 10, 10)


def test_held_out_data_shows_its_first_and_last_loss() -> None:
    rows = [step(1, 1.0), step(2, 1.0, eval_loss=5.0), step(3, 1.0), step(4, 1.0, eval_loss=4.0)]
    assert report(rows).held_out == (5.0, 4.0)
    assert report(rows[:1]).held_out is None


def test_a_step_whose_run_was_killed_before_its_line_counts_as_a_step() -> None:
    # What the saved point knew of step 3 is all there is of it.
    rows = [step(1, 1.0), step(2, 2.0), {"step": 3, "epoch": 0, "loss": 1.0, "learning_rate": 1e-3}]
    found = report(rows)
    assert (found.steps, found.step_seconds, found.tokens) == (3, 2.0, 80)
    only = report(rows[2:])
    assert (only.steps, only.step_seconds, only.tokens_per_s, only.busy_share) == (3, 0.0, 0.0, {})


def test_a_line_that_a_crash_cut_off_ends_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(step(1, 1.0)) + "\n" + json.dumps(step(2, 1.0))[:50])
    assert [row["step"] for row in read_metrics(path)] == [1]
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("passed_over", (0, 3))
def test_runs_stand_beside_each_other_without_lines_that_say_nothing(passed_over: int) -> None:
    console = Console(record=True, width=160, quiet=False, file=None)
    one = report([step(1, 1.0), step(2, 1.0, skipped_steps=passed_over)])
    with console.capture() as capture:
        print_runs(console, [one, replace(one, run="runs/b", skipped_steps=0)])
    shown = capture.get()
    assert "runs/a" in shown and "runs/b" in shown and "2 of 20" in shown
    assert ("3 batches" in shown) == bool(passed_over) == ("passed over" in shown)
    assert "held-out" not in shown and "device peak" not in shown
