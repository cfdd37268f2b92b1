from pathlib import Path

import pytest

import directories
from spillway.data.encode import encode_files
from spillway.spec.errors import DataError


def test_only_the_completion_and_its_end_are_trained(tmp_path: Path) -> None:
    tokenizer = directories.make_tokenizer()
    path = directories.write_lines(tmp_path / "a.jsonl", [{"prompt": "The river", "completion": " carries"}])
    (sample,) = encode_files([path], tokenizer, 64).samples
    assert tokenizer.decode(sample.ids[sample.trained]) == " carries<|end|>"


def test_text_longer_than_a_row_goes_on_in_the_next_and_conversations_are_cut_and_counted(tmp_path: Path) -> None:
    tokenizer = directories.make_tokenizer()
    text = directories.write_lines(tmp_path / "a.jsonl", [{"text": "The river carries. " * 30}])
    encoded = encode_files([text], tokenizer, 16)
    assert len(encoded.samples) > 3 and encoded.num_truncated == 0
    row = directories.chat("a", "The river carries. " * 30)
    chats = directories.write_lines(tmp_path / "b.jsonl", [row])
    encoded = encode_files([chats], tokenizer, 40)
    assert encoded.num_truncated == 1 and encoded.lost_tokens > 0


def test_a_cut_that_takes_every_answer_is_an_error(tmp_path: Path) -> None:
    path = directories.write_lines(tmp_path / "a.jsonl", [directories.chat("The river carries. " * 30, "no")])
    with pytest.raises(DataError, match="no token would be trained"):
        encode_files([path], directories.make_tokenizer(), 16)


def test_empty_files_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="there are no records"):
        encode_files([tmp_path / "a.jsonl"], directories.make_tokenizer(), 16)


def test_the_fingerprint_changes_with_any_token(tmp_path: Path) -> None:
    tokenizer = directories.make_tokenizer()
    prints = set()
    for number, text in enumerate(("The river", "The rivers", "The river")):
        path = directories.write_lines(tmp_path / f"{number}.jsonl", [{"text": text}])
        prints.add(encode_files([path], tokenizer, 64).fingerprint())
    assert len(prints) == 2
