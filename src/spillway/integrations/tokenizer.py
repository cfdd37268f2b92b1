"""The tokenizer of a model directory."""

import hashlib
from pathlib import Path
from typing import Any

import transformers

from spillway.integrations.huggingface import config_of
from spillway.spec.errors import UsageError


def load_tokenizer(directory: Path) -> Any:
    """The fast tokenizer that lies beside a model. Raises UsageError where there is none, or no config that can be
    read."""
    config_of(directory)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{directory} has no tokenizer that can be loaded: put tokenizer.json beside the model"
        ) from error
    files = ("tokenizer.json", "tekken.json", *tokenizer.vocab_files_names.values())
    if not any((directory / name).exists() for name in files):  # transformers makes an empty one of some models
        raise UsageError(f"{directory} has no tokenizer: put tokenizer.json beside the model")
    if not tokenizer.is_fast:
        raise UsageError(f"{directory} has only a slow tokenizer: convert it to tokenizer.json (fast) first")
    return tokenizer


def fingerprints(tokenizer: Any) -> dict[str, str]:
    """Of what makes other tokens of a text or a conversation, by part."""
    parts = {
        "vocabulary and rules": tokenizer.backend_tokenizer.to_str(),
        "chat template": str(tokenizer.chat_template),
    }
    return {part: hashlib.sha256(text.encode()).hexdigest() for part, text in parts.items()}


def pad_id(tokenizer: Any, vocab_size: int | None) -> int:
    """A token for positions that are neither trained nor looked at, one that the model has."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None and (vocab_size is None or candidate < vocab_size):
            return int(candidate)
    return 0
