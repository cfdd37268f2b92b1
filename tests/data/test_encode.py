from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

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


def test_an_end_that_the_user_wrote_stays_and_is_not_doubled(tmp_path: Path) -> None:
    row = {"prompt": "The river<|end|>", "completion": " carries<|end|>"}
    path = directories.write_lines(tmp_path / "a.jsonl", [row])
    plain, ending = directories.make_tokenizer(), directories.make_tokenizer()
    end = (plain.eos_token, plain.eos_token_id)
    ending.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    for tokenizer in (plain, ending):
        (sample,) = encode_files([path], tokenizer, 64).samples
        assert tokenizer.decode(sample.ids) == "The river<|end|> carries<|end|>"
        assert tokenizer.decode(sample.ids[sample.trained]) == " carries<|end|>"


def test_a_token_that_the_model_has_not_is_named(tmp_path: Path) -> None:
    tokenizer = directories.make_tokenizer()
    path = directories.write_lines(tmp_path / "a.jsonl", [{"text": "The river"}, {"text": "The <new> river"}])
    tokenizer.add_tokens("<new>")
    known = len(tokenizer) - 1
    with pytest.raises(DataError, match=rf"a\.jsonl:2: token {known} \('<new>'\) is none of the model's {known}"):
        encode_files([path], tokenizer, 64, vocab_size=known)
    assert encode_files([path], tokenizer, 64, vocab_size=known + 1).num_records == 2
