"""`spillway report` on real runs."""

import json
from pathlib import Path
from typing import Any

import pytest

import directories
from spillway.cli.main import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("trained")
    model, data = directories.make_model(base / "llama"), directories.make_texts(base / "texts.jsonl")
    settings = ["--max-length", "64", "--max-steps", "6", "--eval-steps", "3", "--device", "cpu"]
    given = [str(model), str(data), "--eval-data", str(data), "-o", str(base / "run"), *settings]
    assert run(["train", *given, "--states", "disk"]) == 0
    return base / "run"


def test_a_run_is_reported_as_it_went(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["report", str(trained), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert (found["steps"], found["total_steps"], found["seconds_left"]) == (6, 6, 0)
    assert found["first_loss"] == rows[0]["loss"]
    assert found["held_out"] == [rows[2]["eval_loss"], rows[5]["eval_loss"]]
    assert found["read_bytes"] > 0 and found["written_bytes"] > 0
    plan = json.loads((trained / "plan.json").read_text())
    assert found["predicted_step_seconds"] == plan["step_seconds"]


def test_a_run_that_has_ended_is_told_as_it_was(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> Any:
        capsys.readouterr()
        assert run([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    once = told("report", str(trained))[0]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    model = sum(file.stat().st_size for file in (trained / "model").glob("*.safetensors"))
    by_the_last_step = sum(rows[-1]["written_bytes"].values())
    assert sum(once["written_in_all"].values()) > by_the_last_step + 0.9 * model  # which is written after it
    options = {name: entry["value"] for name, entry in json.loads((trained / "config.json").read_text()).items()}
    again = ["train", options["model"], *options["data"], "-o", str(trained), "--max-length", "64", "--device", "cpu"]
    found = told(*again, "--max-steps", "6", "--eval-data", options["eval_data"][0], "--states", "disk")
    assert sum(found["written_bytes"].values()) == sum(once["written_in_all"].values())
    assert found["eval_losses"] == [row["eval_loss"] for row in rows if row["eval_loss"] is not None]
    assert told("report", str(trained))[0]["written_in_all"] == once["written_in_all"]


def test_runs_are_compared_in_a_picture(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "compared.png"
    assert run(["report", str(trained), f"{trained}/../run", "--chart", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    shown = capsys.readouterr()
    assert "6 of 6" in shown.out and "held-out loss" in shown.out and str(picture) in shown.err


def test_what_is_no_run_or_has_no_step_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "config.json").write_text((trained / "config.json").read_text())
    for given, why in (
        ([str(tmp_path)], "is not a run directory"),
        ([str(tmp_path / "fresh")], "has made no step yet"),
        ([str(trained), "--chart", str(tmp_path / "a.json")], "must end in .png"),
        ([str(trained), "--chart", str(tmp_path / "none" / "a.png")], "cannot be written"),
        ([], "Missing argument"),
    ):
        capsys.readouterr()
        assert run(["report", *given]) == 2
        assert why in capsys.readouterr().err
