"""Small real models, the same weights every time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 128


def llama(blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=blocks,
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


def gemma2() -> nn.Module:
    """Tied embeddings, soft caps on attention and logits, layers of two kinds."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=8,
            final_logit_softcapping=5.0,
            max_position_embeddings=64,
            attn_implementation="eager",
            pad_token_id=0,
        )
    )


def mixtral(experts: str = "batched_mm") -> nn.Module:
    """Four experts, of which the router picks two."""
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            experts_implementation=experts,
        )
    )


def vit() -> nn.Module:
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=8,
            patch_size=2,
            num_labels=7,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class DiTBlock(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by a condition (Peebles and Xie 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(condition)[:, None].chunk(6, -1)
        heads = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + gate * self.out(mixed)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Predicts the noise in patches of a latent, given a time and a class."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(3))
        self.final = nn.Linear(width, 4)

    def forward(self, latent: torch.Tensor, time: torch.Tensor, classes: torch.Tensor, noise: torch.Tensor) -> Any:
        condition = self.time(time[:, None]) + self.classes(classes)
        x = self.patches(latent + time[:, None, None] * noise)
        for block in self.blocks:
            x = block(x, condition)
        return nn.functional.mse_loss(self.final(x), noise)


def dit() -> nn.Module:
    torch.manual_seed(0)
    return DiT()


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


class ReadElsewhere(nn.Module):
    """Uses the weights of embeddings outside of their calls: of one never called, and of one that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.positions = nn.Embedding(16, 24)
        self.blocks = nn.ModuleList(Block(24) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = (self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]) * attention_mask[..., None]
        for block in self.blocks:
            x, _ = block(x, {"scale": self.scale})
        scores = nn.functional.linear(x, self.embed.weight)
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def read_elsewhere() -> nn.Module:
    torch.manual_seed(0)
    return ReadElsewhere()


def two_lists() -> nn.Module:
    torch.manual_seed(0)
    return TwoLists()


def partly_frozen() -> nn.Module:
    """Blocks of which a part is trained, between an embedding and a head that are frozen, as with adapters."""
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad_("q_proj" in name or "layernorm" in name)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "two_lists": two_lists,
    "read_elsewhere": read_elsewhere,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "vit": vit,
    "dit": dit,
    "partly_frozen": partly_frozen,
}


def batch(name: str, seed: int, rows: int = 4, length: int = 16) -> dict[str, torch.Tensor]:
    """What the model takes. Texts: padded rows of unequal length, padding not trained."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 7, (rows,), generator=generator)}
    if name == "dit":
        latent, noise = torch.randn(2, rows, length, 4, generator=generator)
        time, classes = torch.rand(rows, generator=generator), torch.randint(0, 10, (rows,), generator=generator)
        return {"latent": latent, "time": time, "classes": classes, "noise": noise}
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    ids = ids.masked_fill(mask == 0, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(output: object) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss  # type: ignore[attr-defined]


def train(model: Any, optimizer: Any, name: str, steps: int, device: str) -> list[float]:
    """The losses of so many steps, each with the next batch of that architecture."""
    losses = []
    for step in range(steps):
        loss = loss_of(model(**{key: value.to(device) for key, value in batch(name, step).items()}))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
