"""Small real models, the same weights every time."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 128


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.up(self.norm(x)) * scale["scale"])
        return x + self.down(hidden), hidden.mean()


class TwoLists(nn.Module):
    """Two ModuleLists, a parameter of its own, nested arguments, an unused block, and a value-free loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.first = nn.ModuleList(Block(24) for _ in range(2))
        self.second = nn.ModuleList(Block(24) for _ in range(3))
        self.unused = nn.ModuleList([Block(24)])
        self.scale = nn.Parameter(torch.ones(48))
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * attention_mask[..., None]
        for block in (*self.first, *self.second):
            x, _ = block(x, {"scale": self.scale})
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def two_lists() -> nn.Module:
    torch.manual_seed(0)
    return TwoLists()


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "t5": t5, "two_lists": two_lists}


def batch(name: str, seed: int, rows: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    """Padded rows of unequal length, padding not trained."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    ids = ids.masked_fill(mask == 0, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(output: object) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss  # type: ignore[attr-defined]
