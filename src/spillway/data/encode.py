"""Records to tokens and masks."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spillway.data.chat import encode_chat
from spillway.data.records import Record, read_records
from spillway.spec.errors import DataError


@dataclass(frozen=True, slots=True)
class Sample:
    """One document, at most max_length tokens: ids int32 [n], trained bool [n]."""

    ids: np.ndarray[Any, np.dtype[np.int32]]
    trained: np.ndarray[Any, np.dtype[np.bool_]]
    where: str


@dataclass(slots=True)
class Encoded:
    """All samples of a run and what happened to them on the way."""

    samples: list[Sample] = field(default_factory=list)
    num_records: int = 0
    num_truncated: int = 0  # samples cut at max_length
    num_lost: int = 0  # samples of which nothing trained was left by the cut
    lost_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples."""
        return sum(sample.ids.size for sample in self.samples)

    @property
    def num_trained(self) -> int:
        """Tokens that are trained."""
        return int(sum(sample.trained.sum() for sample in self.samples))

    def fingerprint(self) -> str:
        """Changes with any token or mask: a run is only resumed with the data it had."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.ids.tobytes())
            digest.update(sample.trained.tobytes())
            digest.update(b"|")
        return digest.hexdigest()

    def checksums(self) -> list[int]:
        """A CRC-32 of each sample's tokens and mask: which of them differ from other ones."""
        return [zlib.crc32(sample.trained.tobytes(), zlib.crc32(sample.ids.tobytes())) for sample in self.samples]


def encode_files(
    paths: Sequence[str | Path],
    tokenizer: Any,
    max_length: int,
    progress: Callable[[int], None] | None = None,
    vocab_size: int | None = None,
) -> Encoded:
    """Samples of every record. Text longer than `max_length` goes on in further samples; conversations and completions
    are cut there and counted. `progress` is called with the number of records so far. `vocab_size`: tokens that the
    model has, where it is known.

    Raises DataError naming file and line; also when there is nothing to train on, or a token that the model has not.
    """
    result = Encoded()
    for record in read_records(paths):
        result.num_records += 1
        ids, trained = encode_record(record, tokenizer)
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            raise DataError(
                f"{record.where}: token {max(ids)} ({tokenizer.convert_ids_to_tokens(max(ids))!r}) is none of the "
                f"model's {vocab_size}: use the tokenizer of this model, or resize the model's embeddings to it"
            )
        _add(result, record, ids, trained, max_length)
        if progress is not None:
            progress(result.num_records)
    files = ", ".join(str(path) for path in paths)
    if result.num_records == 0:
        raise DataError(f"{files}: there are no records, so there is nothing to train on")
    if result.num_trained == 0:
        raise DataError(
            f"{files}: no token would be trained; with max_length {max_length} the cut may take every answer: raise it"
        )
    return result


def encode_record(record: Record, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of one record and which of them are trained. Raises DataError."""
    if record.kind == "messages":
        return encode_chat(record, tokenizer)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if record.kind == "text":
        ids = _without_end(_ids(record.text, tokenizer), end) + end
        return ids, [True] * len(ids)
    prompt = _ids(record.prompt, tokenizer)
    if end and prompt[-1:] == end and _ends_every_text(tokenizer, end):
        prompt = prompt[:-1]  # the completion goes on from there
    completion = _ids(record.completion, tokenizer, add_special_tokens=False)
    if not completion:
        raise DataError(f"{record.where}: 'completion' is empty, so no token would be trained")
    completion = _without_end(completion, end) + end
    return prompt + completion, [False] * len(prompt) + [True] * len(completion)


def _ids(text: str, tokenizer: Any, **more: bool) -> list[int]:
    return list(tokenizer(text, verbose=False, **more)["input_ids"])


def _ends_every_text(tokenizer: Any, end: list[int]) -> bool:
    """Whether an end that is there may be the tokenizer's own."""
    return _ids("a", tokenizer)[-1:] == end


def _without_end(ids: list[int], end: list[int]) -> list[int]:
    """One is put there in any case."""
    return ids[:-1] if end and ids[-1:] == end else ids


def _add(result: Encoded, record: Record, ids: list[int], trained: list[bool], max_length: int) -> None:
    starts = range(0, len(ids), max_length) if record.kind == "text" else range(1)
    if record.kind != "text" and len(ids) > max_length:
        result.num_truncated += 1
        result.lost_tokens += len(ids) - max_length
    for start in starts:
        part = slice(start, start + max_length)
        sample = Sample(np.array(ids[part], np.int32), np.array(trained[part], np.bool_), record.where)
        # The first token of a sample has nothing before it to be predicted from.
        if sample.trained[1:].any():
            result.samples.append(sample)
        elif record.kind != "text":
            result.num_lost += 1
