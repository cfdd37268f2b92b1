import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from directories import write_lines
from spillway.data.records import read_records
from spillway.spec.errors import DataError


def kinds(*paths: Path) -> list[str]:
    return [record.kind for record in read_records(paths)]


def test_what_a_record_is_shows_in_its_fields(tmp_path: Path) -> None:
    rows = [
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    assert kinds(write_lines(tmp_path / "a.jsonl", rows)) == ["text", "completion", "messages"]


def test_text_json_and_parquet_files_and_directories_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.json").write_text('[{"text": "one"}, {"text": "two"}]')
    (tmp_path / "c.json").write_text('\ufeff{"text": "one"}\n{"text": "two"}\n')  # begun as editors on Windows do
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y"]}), tmp_path / "d.parquet")
    assert kinds(tmp_path) == ["text"] * 7


def test_prompt_and_completion_may_be_conversations(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    (record,) = read_records([write_lines(tmp_path / "a.jsonl", [row])])
    assert record.kind == "messages" and record.trained_from == 1


def test_records_of_sharegpt_and_alpaca_are_conversations(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"instruction": "a", "input": "i", "output": "b"},
        {"instruction": "a", "input": "", "output": "b", "system": "s"},
    ]
    found = [
        [(message["role"], message["content"]) for message in record.messages]
        for record in read_records([write_lines(tmp_path / "a.jsonl", rows)])
    ]
    turn = [("user", "a"), ("assistant", "b")]
    assert found == [[("system", "s"), *turn], turn, [("user", "a\n\ni"), turn[1]], [("system", "s"), *turn]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"conversations": [{"from": "bot", "value": "a"}]}', "turn 1 is from 'bot'"),
        ('{"conversations": {}}', "must be a list of objects with 'from'"),
        ('{"instruction": "a"}', "needs 'output' too"),
        ('{"txt": "a"}', "this one has 'txt'"),
        ('{"text": null}', r"this one has 'text' \(null\)"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot' of message 1 is unknown"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to train on"),
        ('{"messages": [{"role": "user"}]}', r"message 1 \(user\) has no 'content'"),
        ('{"messages": []}', "must be a list of objects"),
        ('{"prompt": "a"}', "needs 'completion' too"),
        ('{"text": 3}', "'text' must be text, this is a number"),
        ("[1]", "this is a list"),
        ("{oops", "this line is not JSON"),
        ('{"messages": [{"role": "user"\n', r"this line is not JSON \(Expecting ',' delimiter at column 30\)"),
        ('{"text": "tab\t"}', r"this line is not JSON \(Invalid control character at column 14\)"),
        (r'{"text": "\ud83d cut"}', r"\\ud83d is half a character"),
        (r'{"prompt": "a", "completion": ["\uDE00"]}', r"\\ude00 is half a character"),
        (
            '{"messages": [{"role": "assistant", "content": [{"type": "image", "image": "x.png"}]}]}',
            r"message 1 \(assistant\) has content that is not text \(image\)",
        ),
        ('{"messages": [{"role": "assistant", "content": 5}]}', "has content that is not text, but a number"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": 5}', "'tools' must be a list of objects"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "tools": "{oops"}', "'tools' is text that is not JSON"),
        ('{"conversations": [{"from": ["gpt"], "value": "a"}]}', r"turn 1 is from '\['gpt'\]'"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=f"bad.jsonl:3: .*{message}"):
        list(read_records([path]))


def test_missing_unknown_and_binary_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in (("none.txt", "does not exist"), ("a.csv", "unknown type"), ("b.txt", "not UTF-8")):
        with pytest.raises(DataError, match=f"{name}.*{message}"):
            list(read_records([tmp_path / name]))


def test_a_file_of_one_conversation_is_a_record(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "one.json"
    for content in ({"messages": turns}, {"rows": [{"messages": turns}]}, [{"messages": turns}]):
        file.write_text(json.dumps(content))
        (record,) = read_records([file])
        assert record.kind == "messages" and len(record.messages) == 2


def test_the_text_of_content_in_parts_is_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    path = tmp_path / "parts.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    (record,) = read_records([path])
    assert record.messages[0]["content"] == "ab"


def test_directories_are_read_with_those_below_and_without_what_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / ".cache").mkdir()
    names = ("b.txt", "below/c.txt", ".hidden.txt", ".cache/d.txt", "._a.txt", "table.csv")
    for name in names:
        (tmp_path / name).write_text(name)
    assert [record.text for record in read_records([tmp_path])] == ["b.txt", "below/c.txt"]


def test_half_a_character_in_a_list_of_records_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "fine \\ud83d\\ude00"}, {"text": "cut \\ud83d"}]')
    with pytest.raises(DataError, match=r"rows.json:2: \\ud83d is half a character"):
        list(read_records([path]))


def test_tools_may_be_text_and_belong_to_every_conversation(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "gate", "parameters": {}}}]
    said = [{"role": "user", "content": "open"}], [{"role": "assistant", "content": "done"}]
    rows: list[object] = [
        {"messages": said[0] + said[1], "tools": tools},
        {"messages": said[0] + said[1], "tools": json.dumps(tools)},
        {"prompt": said[0], "completion": said[1], "tools": tools},
    ]
    records = list(read_records([write_lines(tmp_path / "a.jsonl", rows)]))
    assert [list(record.tools) for record in records] == [tools] * 3


def test_the_line_of_bytes_that_are_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "lock"}\r\n' * 1 + b'{"text": "gate"}\n' * 3000 + b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:3002: this is not UTF-8 text .* at byte 10 of the line"):
        list(read_records([path]))


def test_a_record_that_is_nested_too_deeply_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(DataError, match="nested too deeply"):
        list(read_records([tmp_path / "a.jsonl"]))
