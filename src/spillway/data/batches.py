"""Packs samples into rows and rows into batches. The position in the data is (seed, epoch, index) and nothing else."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spillway.data.encode import Sample
from spillway.spec.sizes import align

IGNORED = -100  # a label that is not trained
_OPEN_ROWS = 64
_LENGTH_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The next batch: its epoch and its index within it."""

    epoch: int = 0
    index: int = 0


class Batches:
    """Every batch of a run by position, in O(1) once an epoch's order is drawn.

    Samples are shuffled by (seed, epoch). With `packing` several share a row of at most `max_length` tokens, each with
    positions of its own: from those the model sees where one begins. In the first epoch the longest batch goes first.
    """

    def __init__(
        self, samples: list[Sample], rows: int, max_length: int, seed: int, packing: bool, pad_id: int
    ) -> None:
        self._samples = samples
        self._rows = rows
        self._max_length = max_length
        self._seed = seed
        self._packing = packing
        self._pad_id = pad_id
        self._lengths = np.array([sample.ids.size for sample in samples])
        self._drawn: tuple[int, list[list[list[int]]]] | None = None

    def per_epoch(self, epoch: int = 0) -> int:
        """Batches of an epoch."""
        return len(self._epoch(epoch))

    def at(self, position: DataPosition) -> dict[str, torch.Tensor]:
        """The batch at a position: input_ids, position_ids and labels, each [rows, length]."""
        batch = self._epoch(position.epoch)[position.index]
        return self._collate(batch, self._length(batch))

    def num_tokens(self, position: DataPosition) -> int:
        """Of the samples in the batch; what fills the rows up is none."""
        return sum(int(self._lengths[row].sum()) for row in self._epoch(position.epoch)[position.index])

    def sources(self, position: DataPosition) -> list[str]:
        """Where the samples of the batch come from (file:line), each once, in order."""
        rows = self._epoch(position.epoch)[position.index]
        return list(dict.fromkeys(self._samples[sample].where for row in rows for sample in row))

    def after(self, position: DataPosition) -> DataPosition:
        """The position that follows."""
        if position.index + 1 < self.per_epoch(position.epoch):
            return DataPosition(position.epoch, position.index + 1)
        return DataPosition(position.epoch + 1, 0)

    def longest(self) -> dict[str, torch.Tensor]:
        """A batch that takes as much memory as any of any epoch: as many rows, as long, and with two documents in one
        where a row can have them."""
        order = [int(sample) for sample in np.argsort(self._lengths, kind="stable")]
        row, shortest = order[-1:], order[:2]
        total = int(self._lengths.sum()) if self._packing else int(self._lengths[row[0]])
        if self._packing and len(shortest) == 2 and self._lengths[shortest].sum() <= self._max_length:
            row = shortest
        # Of two packed rows that are still open, one is more than half full.
        most = 2 * total // self._max_length + 1 if self._packing else len(order)
        rows = min(self._rows, len(order), most)
        return self._collate([row] * rows, self._row_length(min(total, self._max_length)))

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, self._draw(epoch))
        return self._drawn[1]

    def _draw(self, epoch: int) -> list[list[list[int]]]:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._samples))
        rows = self._pack(order) if self._packing else [[int(sample)] for sample in order]
        batches = [rows[start : start + self._rows] for start in range(0, len(rows), self._rows)]
        if epoch == 0:
            weight = [(len(batch) * self._length(batch), max(map(len, batch)) > 1) for batch in batches]
            batches.insert(0, batches.pop(weight.index(max(weight))))
        return batches

    def _pack(self, order: Any) -> list[list[int]]:
        """Best fit among the rows still open; the fullest is closed when too many are."""
        done: list[list[int]] = []
        open_rows: list[tuple[int, list[int]]] = []  # room left, samples
        for sample in order:
            length = int(self._lengths[sample])
            fitting = [place for place, (room, _) in enumerate(open_rows) if room >= length]
            if fitting:
                best = min(fitting, key=lambda place: open_rows[place][0])
                room, row = open_rows.pop(best)
                row.append(int(sample))
                open_rows.append((room - length, row))
            else:
                open_rows.append((self._max_length - length, [int(sample)]))
            if len(open_rows) > _OPEN_ROWS:
                fullest = min(range(len(open_rows)), key=lambda place: open_rows[place][0])
                done.append(open_rows.pop(fullest)[1])
        return done + [row for _, row in open_rows]

    def _length(self, batch: list[list[int]]) -> int:
        return self._row_length(max(int(self._lengths[row].sum()) for row in batch))

    def _row_length(self, tokens: int) -> int:
        return min(align(tokens, _LENGTH_MULTIPLE), self._max_length)

    def _collate(self, batch: list[list[int]], length: int) -> dict[str, torch.Tensor]:
        ids = np.full((len(batch), length), self._pad_id, np.int64)
        labels = np.full((len(batch), length), IGNORED, np.int64)
        positions = np.zeros((len(batch), length), np.int64)
        for number, row in enumerate(batch):
            at = 0
            for index in row:
                sample = self._samples[index]
                part = slice(at, at + sample.ids.size)
                ids[number, part] = sample.ids
                # The first token of a document is never predicted from the document before it.
                labels[number, part] = np.where(sample.trained, sample.ids, IGNORED)
                labels[number, at] = IGNORED
                positions[number, part] = np.arange(sample.ids.size)
                at += sample.ids.size
            # Padding is a document that begins anew; behind a single one it goes on, for plain causal attention.
            positions[number, at:] = np.arange(length - at) + (at if len(row) == 1 else 0)
        return {
            "input_ids": torch.from_numpy(ids),
            "position_ids": torch.from_numpy(positions),
            "labels": torch.from_numpy(labels),
        }
