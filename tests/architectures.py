"""Every architecture of the installed transformers, made tiny from its own default config."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, ROWS, LENGTH = 128, 2, 12
MOST_PARAMS = 30_000_000
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "text": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
# What configs call their sizes, and small ones that go together.
_WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width", "emb_dim", "dim"), 32
)
_INNER = dict.fromkeys(
    ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
     "shared_expert_intermediate_size"), 48)  # fmt: skip
_LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
     "num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "num_kv_heads"), 2)  # fmt: skip
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
     "num_experts", "num_local_experts", "n_routed_experts"), 4)  # fmt: skip
_HEAD_WIDTHS = dict.fromkeys(
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim", "d_kv"), 8
)
_STATES = {
    "state_size": 4, "conv_kernel": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "expand": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
}  # fmt: skip
_ROUTING = {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "sliding_window": 8}
_TEXTS = {"vocab_size": VOCAB, "max_position_embeddings": 64, "n_positions": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_NO_DROPOUT = dict.fromkeys(
    ("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate",
     "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "layerdrop",
     "encoder_layerdrop", "decoder_layerdrop", "drop_path_rate"), 0.0)  # fmt: skip
SMALL: dict[str, Any] = {
    **_WIDTHS, **_INNER, **_LAYERS, **_HEADS, **_HEAD_WIDTHS, **_STATES, **_ROUTING, **_TEXTS, **_TOKENS, **_NO_DROPOUT,
}  # fmt: skip
# Sizes that some configs work out from others: tried with all, then without.
_LEFT_OUT = ((), ("head_dim",), tuple(_HEAD_WIDTHS), ("layer_types",), ("layer_types", "head_dim"))
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")
_NOT_GIVEN = ("transformers_version", "model_type", "architectures", "dtype")


def tiny(kind: str, name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of an architecture, and a batch for it. Skips the test where its config is not made small that easily, or
    plain PyTorch does not train it."""
    chosen = KINDS[kind][name]
    model_class = getattr(transformers, chosen if isinstance(chosen, str) else chosen[0], None)
    if model_class is None:
        pytest.skip("transformers does not export it")
    problem = ""
    for left_out in _LEFT_OUT:
        try:
            config = _small(CONFIG_MAPPING[name], left_out)
            with torch.device("meta"):
                params = sum(param.numel() for param in model_class(config).parameters())
            if params > MOST_PARAMS:
                problem = f"{params:,} parameters"
                continue
            torch.manual_seed(0)
            model = model_class(config).float().train()
            given = batch(kind, config, 0)
            model(**given).loss.backward()
            model.zero_grad()
            return model, given
        except Exception as error:  # whatever a config refuses, or a model of sizes that do not go together
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
    pytest.skip(problem[:120])


def batch(kind: str, config: Any, seed: int) -> dict[str, torch.Tensor]:
    """Rows of it."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(ROWS) % 2
    if kind == "image":
        size = getattr(config, "image_size", 64)
        side = size if isinstance(size, int) else size[0]
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.randn(ROWS, channels, side, side, generator=generator), "labels": classes}
    ids = torch.randint(3, 100, (ROWS, LENGTH), generator=generator)
    labels = classes if kind == "text" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _small(config_class: Any, left_out: tuple[str, ...]) -> Any:
    default = config_class()
    try:
        given = _shrunk(default.to_dict(), left_out)
        return config_class(**{key: value for key, value in given.items() if key not in _NOT_GIVEN})
    except Exception:  # some give what they do not take
        taken = inspect.signature(config_class).parameters
        return config_class(**{key: value for key, value in SMALL.items() if key in taken and key not in left_out})


def _shrunk(given: dict[str, Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, dict) and key.endswith("_config"):
            found[key] = _shrunk(value, left_out)
        elif key in SMALL and key not in left_out and value is not None:
            found[key] = SMALL[key]
        elif key in _PER_LAYER and isinstance(value, (list, tuple)) and value:
            if key not in left_out:
                found[key] = (list(dict.fromkeys(value)) * 2)[:2]
        elif key in ("image_size", "patch_size") and isinstance(value, int):
            found[key] = 64 if key == "image_size" else 8
        else:
            found[key] = value
    return found
