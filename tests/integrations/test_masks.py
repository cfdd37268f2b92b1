"""What is planned for is what a step does: attention with a mask, or without."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import models
import spillway
from spillway.integrations.masks import MaskFacts, read_masks
from spillway.planning.profiler import ModelProfiler

LENGTH = 16


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, models.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    made = {"input_ids": ids, "labels": ids}
    if kind == "whole rows":
        made["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
    elif kind == "padded":
        made["attention_mask"] = torch.tensor([[1] * LENGTH, [1] * 10 + [0] * 6])
    elif kind == "packed":
        made["position_ids"] = torch.cat([torch.arange(10), torch.arange(6)]).expand(2, LENGTH).contiguous()
    elif kind == "positions":
        made["position_ids"] = torch.arange(LENGTH).expand(2, LENGTH).contiguous()
    return made


def test_a_mask_given_by_its_place_is_seen_as_one_given_by_its_name() -> None:
    losses = []
    for by_place in (False, True):
        model, optimizer = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-2), device="cpu", micro_batch=1)
        for number in range(2):
            given = models.batch("llama", number)
            places = (given.pop("input_ids"), given.pop("attention_mask"))
            named = {"input_ids": places[0], "attention_mask": places[1]}
            loss = (model(*places, **given) if by_place else model(**named, **given)).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        spillway.close(model)
    assert losses[0] == losses[1]


KINDS = ("plain", "whole rows", "padded", "packed", "positions")


DECODERS = (models.llama, models.mixtral, models.gpt2)
CASES = [*itertools.product(DECODERS, KINDS), *itertools.product((models.t5,), ("plain", "whole rows", "padded"))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "kind"), CASES)
def test_a_profile_has_the_masks_of_a_step(make: object, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool, bool]] = []
    original = functional.scaled_dot_product_attention

    def noted(*args: object, **kwargs: object) -> torch.Tensor:
        gqa, causal = bool(kwargs.get("enable_gqa")), bool(kwargs.get("is_causal"))
        seen.append((kwargs.get("attn_mask") is not None, causal, gqa))
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    model: nn.Module = make()  # type: ignore[operator]
    model(**batch(kind), use_cache=False)
    in_a_step = list(seen)
    seen.clear()
    ModelProfiler(make()).of(batch(kind), None)  # type: ignore[operator]
    assert in_a_step and seen[: len(in_a_step)] == in_a_step


def test_what_values_tell_is_read_from_the_batch() -> None:
    facts = [read_masks(batch(kind)) for kind in KINDS]
    nothing = MaskFacts(is_packed=False, is_padded=False)
    assert facts == [nothing, nothing, MaskFacts(False, True), MaskFacts(True, False), nothing]
