"""Whether a transformers model computes documents that share a row as if each were alone."""

from pathlib import Path
from unittest import mock

import torch
from torch import nn
from transformers import masking_utils

from spillway.integrations.huggingface import CAUSAL_LM, build_from_config, config_of, cut_layers

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class _Told(Exception):
    """The model's masks are made from its position ids."""


def keeps_documents_apart(directory: Path) -> bool:
    """Whether positions that begin anew are all that the model of a directory needs to see where a document begins.
    transformers then makes each layer's mask from them, in the form that its attention takes; but not every model hands
    them on, and layers with a state (convolutions, linear attention) have no mask. Raises UsageError."""
    config = config_of(directory)
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if not _ATTENTION.issuperset(kinds):
        return False
    cut_layers(config, 2)
    model = build_from_config(config, CAUSAL_LM, torch.bfloat16)
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return False
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", side_effect=_Told):
        try:
            model(input_ids=ids, position_ids=ids, use_cache=False)
        except _Told:
            return True
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False  # it came to what has no values on the meta device without having asked for positions
    return False
