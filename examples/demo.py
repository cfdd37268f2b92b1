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


def make_text(directory: Path) -> Path:
    """One file per help topic."""
    texts = directory / "text"
    texts.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(sorted(topics)):
        (texts / f"{number:03d}.txt").write_text(topics[name], encoding="utf-8")
    return texts


def make_model(directory: Path, texts: Path) -> Path:
    """A Hugging Face model directory: config, safetensors, tokenizer."""
    model_directory = directory / "llama-128m"
    bpe = ByteLevelBPETokenizer()
    bpe.train(
        [str(file) for file in sorted(texts.iterdir())], VOCABULARY, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=15,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(model_directory)
    tokenizer.save_pretrained(model_directory)
    print(f"made {model_directory}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
    return model_directory


def main() -> None:
    """Write model and text below a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    make_model(directory, make_text(directory))


if __name__ == "__main__":
    main()
