"""Makes what the demo trains: a Llama of 128 million parameters with random weights, a byte-level BPE tokenizer, and
text. No network: the tokenizer is trained on the spot and the text is what every Python installation carries, the
topics of its own help system (pydoc_data.topics)."""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 8192
SHAPES = {
    "128m": {
        "vocab_size": VOCABULARY,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 15,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "1.1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


def make_text(directory: Path) -> Path:
    """One file per help topic."""
    texts = directory / "text"
    texts.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(sorted(topics)):
        (texts / f"{number:03d}.txt").write_text(topics[name], encoding="utf-8")
    return texts


def make_tokenizer(texts: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the texts."""
    bpe = ByteLevelBPETokenizer()
    files = [str(file) for file in sorted(texts.iterdir())]
    bpe.train(files, VOCABULARY, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def make_model(directory: Path, texts: Path, shape: str) -> Path:
    """A Hugging Face model directory: config, safetensors, tokenizer."""
    model_directory = directory / f"llama-{shape}"
    tokenizer = make_tokenizer(texts)
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(default)
    model.save_pretrained(model_directory)
    tokenizer.save_pretrained(model_directory)
    print(f"made {model_directory}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    return model_directory


def main() -> None:
    """Write model and text below a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="128m")
    options = parser.parse_args()
    make_model(options.directory, make_text(options.directory), options.shape)


if __name__ == "__main__":
    main()
