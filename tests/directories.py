"""Model directories and data files as users have them, small."""

import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = [
    "The river carries what the mountain lets go.",
    "A lock lifts boats from one level to the next.",
    "When the reservoir is full the spillway takes the rest.",
    "Gates open in order, never all at once.",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    specials = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(SENTENCES * 4, 300, special_tokens=specials, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=specials[1:],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(directory: Path, template: str | None = CHATML, architecture: str = "llama", **config: object) -> Path:
    torch.manual_seed(1)
    tokenizer = make_tokenizer(template)
    if architecture == "llama":
        settings = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        model = LlamaForCausalLM(
            LlamaConfig(**{"vocab_size": 300, "max_position_embeddings": 256, **settings, **config})
        )
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=256, n_embd=64, n_layer=2, n_head=4))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_texts(path: Path, count: int = 40) -> Path:
    return write_lines(path, [{"text": " ".join(SENTENCES[: 1 + index % 4])} for index in range(count)])


def chat(*contents: str) -> dict[str, object]:
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]}
