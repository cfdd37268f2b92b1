import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from spillway.data.batches import Batches, DataPosition
from spillway.data.encode import Sample


def samples(lengths: list[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(rng.integers(1, models.VOCAB, n).astype(np.int32), np.ones(n, np.bool_), f"x:{i}")
        for i, n in enumerate(lengths)
    ]


def all_batches(batches: Batches, epoch: int) -> list[dict[str, torch.Tensor]]:
    return [batches.at(DataPosition(epoch, index)) for index in range(batches.per_epoch(epoch))]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 50), min_size=1, max_size=60), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_every_token_is_seen_once_an_epoch(lengths: list[int], rows: int, packing: bool, epoch: int) -> None:
    batches = Batches(samples(lengths), rows, 50, 1, packing, 0)
    seen = sum(int((batch["labels"] != -100).sum()) for batch in all_batches(batches, epoch))
    assert seen == sum(length - 1 for length in lengths)
    positions = [DataPosition(epoch, index) for index in range(batches.per_epoch(epoch))]
    assert sum(map(batches.num_tokens, positions)) == sum(lengths)


def test_the_same_seed_gives_the_same_order_and_epochs_differ() -> None:
    lengths = list(range(2, 40))
    one, two = (Batches(samples(lengths), 2, 64, 7, True, 0) for _ in range(2))
    for epoch in range(3):
        for ours, theirs in zip(all_batches(one, epoch), all_batches(two, epoch), strict=True):
            assert torch.equal(ours["input_ids"], theirs["input_ids"])
    assert not torch.equal(one.at(DataPosition(1, 0))["input_ids"], one.at(DataPosition(2, 0))["input_ids"])


def test_the_longest_batch_goes_first() -> None:
    batches = Batches(samples([3, 4, 200, 5, 6]), 1, 256, 3, False, 0)
    lengths = [batch["input_ids"].shape[1] for batch in all_batches(batches, 0)]
    assert lengths[0] == max(lengths) and batches.longest()["input_ids"].shape[1] == lengths[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 90), min_size=1, max_size=60), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_no_batch_of_any_epoch_takes_more_than_the_longest(
    lengths: list[int], rows: int, packing: bool, epoch: int
) -> None:
    batches = Batches(samples(lengths), rows, 90, 1, packing, 0)
    (most, longest), packed = batches.longest()["input_ids"].shape, begin_anew(batches.longest())
    for batch in all_batches(batches, epoch):
        assert batch["input_ids"].shape[0] <= most and batch["input_ids"].shape[1] <= longest
        assert packed or not begin_anew(batch)


def begin_anew(batch: dict[str, torch.Tensor]) -> bool:
    """Whether a row holds several documents, as models see it."""
    return bool((batch["position_ids"].diff(dim=-1) != 1).any())


def test_rows_of_one_document_are_plainly_causal() -> None:
    batch = Batches(samples([30]), 1, 40, 0, True, 0).at(DataPosition())
    assert not begin_anew(batch) and batch["input_ids"].shape == (1, 40)
