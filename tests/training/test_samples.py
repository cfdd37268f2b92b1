"""A file that changed under a run is told by its first sample that did."""

import re
from pathlib import Path

import pytest

import directories
from spillway.data import Encoded, encode_files
from spillway.training.samples import remember_samples, what_differs


def encoded(directory: Path, texts: list[str]) -> Encoded:
    path = directories.write_lines(directory / "data.jsonl", [{"text": text} for text in texts])
    return encode_files([path], directories.make_tokenizer(), 64)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (["The river", "The rivers", "The sea"], "sample 2, of .*data.jsonl:2, is the first that differs .3 samples."),
        (["The river", "The hill", "The sea", "The sky"], "sample 4, of .*data.jsonl:4, .* .4 samples, before 3."),
        (["The river", "The hill"], "samples are missing at the end .2 samples, before 3."),
    ],
)
def test_the_first_sample_that_differs_is_named(now: list[str], said: str, tmp_path: Path) -> None:
    remember_samples(tmp_path, encoded(tmp_path, ["The river", "The hill", "The sea"]))
    found = what_differs(tmp_path, encoded(tmp_path, now))
    assert re.search(said, found), found


def test_where_nothing_was_remembered_or_nothing_differs_nothing_is_said(tmp_path: Path) -> None:
    data = encoded(tmp_path, ["The river"])
    remember_samples(tmp_path, data)
    assert what_differs(tmp_path, data) == ""
    (tmp_path / "samples.json").unlink()
    assert what_differs(tmp_path, data) == ""
    (tmp_path / "samples.json").write_text("[]")
    assert what_differs(tmp_path, data) == ""
