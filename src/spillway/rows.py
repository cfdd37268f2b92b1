"""Rows of tokens for the model of a directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spillway.data import Batches, Encoded, Sample, encode_files
from spillway.integrations.huggingface import vocab_size_of
from spillway.integrations.packing import keeps_documents_apart
from spillway.integrations.tokenizer import load_tokenizer, pad_id


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes rows of `length` tokens at most of a user's files. `vocab_size`: tokens that the model has, where it is
    known. `packs`: a row may hold several samples."""

    tokenizer: Any
    length: int
    vocab_size: int | None
    packs: bool

    @classmethod
    def of(cls, directory: Path, length: int, packing: bool = False) -> "RowMaker":
        """With the tokenizer of a model's directory. Samples share rows only where the model keeps them apart. Raises
        UsageError."""
        packs = packing and keeps_documents_apart(directory)
        return cls(load_tokenizer(directory), length, vocab_size_of(directory), packs)

    def read(self, paths: Sequence[str | Path], progress: Callable[[int], None] | None = None) -> Encoded:
        """See `encode_files`. Raises DataError."""
        return encode_files(paths, self.tokenizer, self.length, progress, self.vocab_size)

    def batches(self, samples: list[Sample], rows: int, seed: int) -> Batches:
        """Of so many rows each, in an order that the seed says."""
        return Batches(samples, rows, self.length, seed, self.packs, pad_id(self.tokenizer, self.vocab_size))
