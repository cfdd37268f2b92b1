"""Which architectures see in their positions where a document begins, by what they compute."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from spillway.data.batches import Batches, DataPosition
from spillway.data.encode import Sample
from spillway.integrations.packing import keeps_documents_apart

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MIXERS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
# Architecture, what its config is given, and whether it keeps them apart. Attention is eager or sdpa, whole, in windows
# or in chunks; with positions rotated or learned or as a bias; and layers that have a state.
SAMPLED = [
    ("Llama", SMALL, True),
    ("Gemma2", {**SMALL, "head_dim": 8, "sliding_window": 4}, True),
    ("Mistral", {**SMALL, "sliding_window": 4}, True),
    ("GPT2", {**OLD, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, True),
    ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, False),
    ("Bamba", {**SMALL, **MIXERS, "attn_layer_indices": [1]}, False),
]
EXPERTS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
MORE = [
    ("Gemma3Text", {**SMALL, "head_dim": 8, "sliding_window": 4}, True),
    ("Qwen2", SMALL, True),
    ("Qwen3", {**SMALL, "head_dim": 8}, True),
    ("Mixtral", {**SMALL, "num_local_experts": 4}, True),
    ("Phi3", SMALL, True),
    ("Olmo2", SMALL, True),
    ("Cohere2", {**SMALL, "sliding_window": 4}, True),
    ("GPTNeoX", SMALL, True),
    ("GPTJ", {**OLD, "rotary_dim": 4}, True),
    ("Llama4Text", {**SMALL, **EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 16}, True),
    ("GptOss", {**SMALL, **EXPERTS, "sliding_window": 4}, False),
    ("OPT", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}, False),
    ("Falcon", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, False),
    ("Mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, False),
    ("Rwkv", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}, False),
    ("MiniMax", {**SMALL, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}, False),
]


def test_the_samples_of_the_architectures_say_so(tmp_path: Path) -> None:
    for number, (name, given, apart) in enumerate(SAMPLED):
        compare(tmp_path / str(number), name, given, apart)


@pytest.mark.full
@pytest.mark.parametrize(("name", "given", "apart"), MORE, ids=[name for name, _, _ in MORE])
def test_more_architectures_say_so(name: str, given: dict, apart: bool, tmp_path: Path) -> None:
    compare(tmp_path, name, given, apart)


def compare(directory: Path, name: str, given: dict, apart: bool) -> None:
    """What is said of it is true of its logits."""
    config = getattr(transformers, f"{name}Config")(**given)
    config.save_pretrained(directory)
    assert keeps_documents_apart(directory) == apart == (largest_difference(config) < 1e-3), name


def largest_difference(config: transformers.PretrainedConfig) -> float:
    """Between the logits of documents packed into a row, and of each alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        if param.dim() > 1:  # as they are made, they hardly tell tokens apart
            torch.nn.init.normal_(param, std=0.3)
    rng = np.random.default_rng(0)
    documents = [
        Sample(rng.integers(3, VOCAB, length).astype(np.int32), np.ones(length, np.bool_), "x")
        for length in (13, 9, 11)
    ]
    batch = Batches(documents, 1, 33, 0, True, 0).at(DataPosition())
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    pieces = batch["input_ids"].tensor_split(starts[1:], dim=1)
    assert len(pieces) == 3
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        alone = torch.cat([model(piece, use_cache=False).logits for piece in pieces], 1)
    return float((packed - alone).abs().max())
