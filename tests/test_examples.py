"""The examples run."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import directories

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_teacher_that_streams_is_distilled_into_a_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = directories.make_model(tmp_path / "teacher")
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    asked = [str(teacher), str(tmp_path / "student"), "--text", str(text), "--store", str(tmp_path / "store"),
             "--layers", "1", "--rows", "2", "--length", "16", "--steps", "5"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["distill.py", *asked])
    runpy.run_path(str(EXAMPLES / "distill.py"), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    first, last = (float(line.split("divergence ")[1].split(",")[0]) for line in (lines[0], lines[-1]))
    assert last < first
    assert json.loads((tmp_path / "student" / "config.json").read_text())["num_hidden_layers"] == 1
