"""Whether a transformers model will need an attention mask: it looks into its batch for that, and where it cannot, as
on fake tensors, it makes one in any case. A plan would then be for other kernels and more memory than a step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """What the values of a batch tell."""

    is_packed: bool  # rows of several documents, by their position ids
    is_padded: bool  # some entry of a padding mask is zero


def read_masks(batch: Mapping[str, Any]) -> MaskFacts:
    """From the arguments of a real forward, by name; looks only at position ids and padding masks, each [rows,
    tokens]."""
    paddings = [value for name, value in batch.items() if name.endswith("attention_mask") and _is_flat(value)]
    positions = batch.get("position_ids")
    is_packed = positions is not None and _is_flat(positions) and bool((positions.diff(dim=-1) != 1).any())
    return MaskFacts(is_packed, any(not bool(mask.all()) for mask in paddings))


@contextmanager
def masks_told(facts: MaskFacts) -> Iterator[None]:
    """Forwards within know these facts, whatever tensors they see."""
    changes: dict[str, Callable[[Any], Any]] = {}
    if not facts.is_packed:
        changes["find_packed_sequence_indices"] = lambda _: lambda *args, **kwargs: None
    if not facts.is_padded:
        changes["_ignore_causal_mask_sdpa"] = changes["_ignore_bidirectional_mask_sdpa"] = _without_padding
    # Another release may not have one of them; its forwards on fake tensors make a mask.
    originals = {name: getattr(masking_utils, name) for name in changes if hasattr(masking_utils, name)}
    try:
        for name, original in originals.items():
            setattr(masking_utils, name, changes[name](original))
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


def _without_padding(original: Callable[..., bool]) -> Callable[..., bool]:
    def ignore(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        return original(None, *args, **kwargs)

    return ignore


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2
