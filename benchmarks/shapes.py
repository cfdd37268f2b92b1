"""Llamas of any size as Hugging Face directories that take no room: what every worker reads of them is real safetensors
files, whose blocks of zeros the file system never stores."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY = 8192


@dataclass(frozen=True)
class Shape:
    """A Llama of `layers` blocks of width `hidden`."""

    hidden: int
    layers: int

    @classmethod
    def near(cls, params: float) -> "Shape":
        """About so many parameters, a layer for every 96 of width (12 times its square in each)."""
        hidden = max(round(2 * params ** (1 / 3) / 128), 1) * 128
        return cls(hidden, max(round((params - 2 * VOCABULARY * hidden) / (12 * hidden**2)), 1))

    @property
    def config(self) -> LlamaConfig:
        """For transformers."""
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 128 * 128,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 128,
            num_key_value_heads=self.hidden // 128,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            dtype="bfloat16",
        )


def make(directory: Path, shape: Shape) -> int:
    """Write the model; returns its number of parameters. Norms are 1, the embedding and the head random (small), all
    else 0: a step moves and computes as much as with any values, and its loss is finite."""
    directory.mkdir(parents=True, exist_ok=True)
    shape.config.save_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16)
    shards: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, tensor in model.state_dict().items():
        block = name.split(".")[2] if ".layers." in name else "outside"
        shards.setdefault(f"model-{block}.safetensors", []).append((name, tensor.shape))
    generator = torch.Generator().manual_seed(0)
    for file, tensors in shards.items():
        _write_shard(directory / file, tensors, generator)
    index = {name: file for file, tensors in shards.items() for name, _ in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(tensor.numel() for tensor in model.state_dict().values())


def _write_shard(path: Path, tensors: list[tuple[str, torch.Size]], generator: torch.Generator) -> None:
    """A safetensors file: length of the header, header, bytes; only what is not zero is written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in tensors:
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, at + 2 * size.numel()]}
        at += 2 * size.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(start + at)
        at = start
        for name, size in tensors:
            values = None
            if "norm" in name:
                values = torch.ones(size, dtype=torch.bfloat16)
            elif ".layers." not in name:
                values = (0.02 * torch.randn(size, generator=generator)).bfloat16()
            if values is not None:
                file.seek(at)
                file.write(save({"x": values})[-2 * size.numel() :])
            at += 2 * size.numel()
