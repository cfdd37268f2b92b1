"""Reads training records from files; what a record is shows in its fields."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway.spec.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
_KINDS = (
    "'messages', 'conversations' (ShareGPT), 'instruction' and 'output' (Alpaca), 'prompt' and 'completion', or 'text'"
)
# Of an object with one of these a file holds the record itself, and not a list of them under a name.
_FIELDS = {"messages", "conversations"}
# Who speaks in ShareGPT's records.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One document: `kind` is text, messages or completion; `where` is file:line for messages to people."""

    kind: str
    where: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    completion: str = ""
    trained_from: int = 0  # of messages: assistant turns before this one are not trained
    tools: tuple[Any, ...] = ()


def read_records(paths: Sequence[str | Path]) -> Iterator[Record]:
    """Every record of the files, in order; a directory stands for the files of known types in it and in those
    below, hidden ones left out.

    Raises DataError naming file and line for anything that is not a usable record.
    """
    for path in data_files(paths):
        try:
            yield from _records_of(path)
        except RecursionError as error:
            raise DataError(f"{path} has a record that is nested too deeply to be read") from error


def _records_of(path: Path) -> Iterator[Record]:
    if path.suffix == ".txt":
        return _text_file(path)
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    return (as_record(row, f"{path}:{number}") for number, row in rows)


def as_record(row: Any, where: str) -> Record:
    """The record of one decoded row. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: a record must be an object with fields, this is {_kind_of(row)}")
    if row.get("messages") is not None:
        messages = _messages(row["messages"], where)
        return Record("messages", where, messages=messages, tools=_tools(row, where))
    if row.get("conversations") is not None:
        return _share_gpt(row, where)
    if row.get("prompt") is not None or row.get("completion") is not None:
        return _completion(row, where)
    if row.get("instruction") is not None:
        return _alpaca(row, where)
    if row.get("text") is not None:
        return Record("text", where, text=_string(row["text"], "text", where))
    fields = ", ".join(f"'{key}'" if row[key] is not None else f"'{key}' (null)" for key in row) or "none"
    raise DataError(f"{where}: a record needs {_KINDS}; this one has {fields}")


def data_files(paths: Sequence[str | Path]) -> Iterator[Path]:
    """The files of these paths, those in a directory sorted. Raises DataError where there is none of a known type."""
    for given in paths:
        path = Path(given)
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and _is_seen(file, path))
            if not found:
                raise DataError(f"{path} has no {', '.join(SUFFIXES)} file in it")
            yield from found
        elif not path.exists():
            raise DataError(f"{path} does not exist: give the path of a {', '.join(SUFFIXES)} file")
        elif path.suffix not in SUFFIXES:
            raise DataError(f"{path} is of an unknown type: give a {', '.join(SUFFIXES)} file")
        else:
            yield path


def _is_seen(file: Path, directory: Path) -> bool:
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(directory).parts)


def _text_file(path: Path) -> Iterator[Record]:
    text = _decode(path)
    if text.strip():
        yield Record("text", f"{path}:1", text=text)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".json":
        try:
            rows = json.loads(_decode(path))
        except ValueError:
            rows = None  # many .json files hold a record per line
        if isinstance(rows, dict) and len(rows) == 1 and not _FIELDS.intersection(rows):
            (inner,) = rows.values()
            rows = inner if isinstance(inner, list) else rows
        if rows is not None:
            for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
                _refuse_half_characters(row, f"{path}:{number}")
                yield number, row
            return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                at = f"byte {error.start} of the line"
                raise DataError(f"{where}: this is not UTF-8 text ({error.reason} at {at})") from error
            if text.strip():
                yield number, _json_line(text.rstrip(), where)


def _json_line(line: str, where: str) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        said = error.msg.removesuffix(" at")  # some of Python's messages end so
        raise DataError(f"{where}: this line is not JSON ({said} at column {error.colno})") from error
    except ValueError as error:
        raise DataError(f"{where}: this line is not JSON ({error})") from error
    if "\\ud" in line or "\\uD" in line:
        _refuse_half_characters(row, where)
    return row


def _refuse_half_characters(value: Any, where: str) -> None:
    """Raise DataError for what JSON can write and no text can hold: a part of an emoji that was cut in two."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise DataError(f"{where}: {half} is half a character (an emoji that was cut?): remove it") from error
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_half_characters(part, where)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # with a byte order mark, as Windows writes, or without
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _messages(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{where}: message {index + 1} has no 'role'")
        role = message["role"]
        if role not in ROLES:
            raise DataError(f"{where}: role '{role}' of message {index + 1} is unknown; expected {'|'.join(ROLES)}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{where}: message {index + 1} ({role}) has no 'content'")
        known = {key: part for key, part in message.items() if part is not None}
        if "content" in known:
            known["content"] = _content(known["content"], f"{where}: message {index + 1} ({role})")
        messages.append(known)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{where}: no message has the role 'assistant', so there is nothing to train on")
    return tuple(messages)


def _content(value: Any, whose: str) -> str:
    """The text of content; it may come in parts, as of the OpenAI interface: a template for text would show these."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, dict)):
        raise DataError(f"{whose} has content that is not text, but {_kind_of(value)}")
    texts = []
    for part in value if isinstance(value, list) else [value]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "an object without a type") if isinstance(part, dict) else _kind_of(part)
            raise DataError(f"{whose} has content that is not text ({kind}): only text is trained")
        texts.append(part["text"])
    return "".join(texts)


def _share_gpt(row: dict[str, Any], where: str) -> Record:
    """Turns with 'from' and 'value'; some files have 'role' and 'content' under the same name."""
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise DataError(f"{where}: 'conversations' must be a list of objects with 'from' and 'value'")
    messages = []
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn:
            role = _SPEAKERS.get(turn["from"]) if isinstance(turn["from"], str) else None
            if role is None:
                known = "|".join(_SPEAKERS)
                raise DataError(f"{where}: turn {index + 1} is from '{turn['from']}'; expected {known}")
            turn = {"role": role, "content": turn.get("value")}
        messages.append(turn)
    has_system = any(isinstance(one, dict) and one.get("role") == "system" for one in messages)
    if row.get("system") is not None and not has_system:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Record("messages", where, messages=_messages(messages, where), tools=_tools(row, where))


def _alpaca(row: dict[str, Any], where: str) -> Record:
    """'instruction', perhaps with an 'input' to it, and the 'output' that is trained: a conversation of one turn."""
    if row.get("output") is None:
        raise DataError(f"{where}: a record with 'instruction' needs 'output' too")
    asked = _string(row["instruction"], "instruction", where)
    given = _string(row.get("input") or "", "input", where)
    messages = [
        {"role": "user", "content": f"{asked}\n\n{given}" if given else asked},
        {"role": "assistant", "content": _string(row["output"], "output", where)},
    ]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _string(row["system"], "system", where)})
    return Record("messages", where, messages=_messages(messages, where))


def _completion(row: dict[str, Any], where: str) -> Record:
    for field in ("prompt", "completion"):
        if row.get(field) is None:
            raise DataError(f"{where}: a record with {_other(field)} needs '{field}' too")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        both = _messages([*prompt, *completion], where)
        return Record("messages", where, messages=both, trained_from=len(prompt), tools=_tools(row, where))
    return Record(
        "completion",
        where,
        prompt=_string(prompt, "prompt", where),
        completion=_string(completion, "completion", where),
    )


def _tools(row: dict[str, Any], where: str) -> tuple[Any, ...]:
    """The functions that the assistant may call; some files hold them as JSON within a string."""
    tools = row.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{where}: 'tools' is text that is not JSON ({error})") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: 'tools' must be a list of objects, each with the schema of a function")
    return tuple(tools)


def _string(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: '{field}' must be text, this is {_kind_of(value)}")
    return value


def _other(field: str) -> str:
    return "'completion'" if field == "prompt" else "'prompt'"


def _kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
