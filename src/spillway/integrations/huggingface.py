"""Hugging Face models: built on the meta device from their config, trained with a chunked cross-entropy, saved with
everything `from_pretrained` wants. The only file that imports transformers for models."""

import inspect
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import nn

from spillway.integrations.caches import train_without_cache
from spillway.integrations.captures import captured
from spillway.integrations.loss import install_loss
from spillway.integrations.masks import masks_told, read_masks
from spillway.runtime.forwards import Look
from spillway.runtime.session import Session
from spillway.spec.errors import DiskError, UsageError

CAUSAL_LM = transformers.AutoModelForCausalLM
_CARRIED = ("generation_config.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json",
            "added_tokens.json", "vocab.json", "merges.txt", "preprocessor_config.json")  # fmt: skip


def find_directory(model: str, allow_pickle: bool = False) -> Path:
    """The local directory of a model: a path as it is, anything else from the hub. Raises UsageError when it cannot be
    had."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"{model} is not a model directory: give a directory with config.json and safetensors files")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", *(["*.bin"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except GatedRepoError as error:
        raise UsageError(
            f"the hub model {model} is gated: accept its terms on its page and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"there is no directory and no hub model called {model}: check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise UsageError(
            f"{model} is not a directory here and the hub could not be reached for it: check the path or the network"
        ) from error


def build_on_meta(directory: Path, auto_class: Any, dtype: torch.dtype, num_layers: int | None = None) -> nn.Module:
    """The model of a directory without its weights: parameters on the meta device, buffers real. `num_layers`: only
    the first blocks.

    Raises UsageError where the directory has no readable config, or the model has not so many blocks.
    """
    config = config_of(directory)
    if num_layers is not None:
        most = getattr(config, "num_hidden_layers", 0)
        if not 1 <= num_layers <= most:
            raise UsageError(f"{directory} has {most} blocks: the first {num_layers} of them cannot be taken")
        cut_layers(config, num_layers)
    built = build_from_config(config, auto_class, dtype)
    if (directory / "generation_config.json").exists():
        built.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return built


def fitting_length(directory: Path, max_length: int) -> int:
    """`max_length`, or the positions that the model of a directory has where they are fewer and can be read."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return max_length
    positions = getattr(config, "max_position_embeddings", None)
    return min(max_length, positions) if isinstance(positions, int) and positions > 0 else max_length


def config_of(directory: Path) -> Any:
    """The config of a model directory. Raises UsageError where there is none that can be read."""
    if not (directory / "config.json").exists():
        raise UsageError(f"{directory} is not a model directory: it has no config.json")
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"{directory} cannot be read as a model: {first}") from error


def vocab_size_of(directory: Path) -> int | None:
    """How many tokens the model of a directory has; None where its config does not say. Raises UsageError where there
    is none that can be read."""
    size = getattr(config_of(directory).get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def build_from_config(config: Any, auto_class: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a config on the meta device. Raises UsageError where `auto_class` is not for it."""
    try:
        build = getattr(auto_class, "from_config", None) or auto_class._from_config
        with accelerate.init_empty_weights(include_buffers=False):
            model: nn.Module = build(config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        name = getattr(config, "_name_or_path", "") or type(config).__name__
        others = "; the command line trains causal language models, spillway.prepare any module"
        hint = others if auto_class is CAUSAL_LM else ""
        raise UsageError(f"{name} cannot be built as {auto_class.__name__}: {first.rstrip('.')}{hint}") from error
    if auto_class is CAUSAL_LM and any(getattr(part, "is_decoder", None) is False for part in model.modules()):
        raise UsageError(
            f"{type(model).__name__} with this config looks both ways, so each position would see the token it is to "
            f"predict: train it for what it is made for with spillway.prepare, or set is_decoder in its config.json"
        )
    tie: Any = model.tie_weights
    tie()
    return model


def gpt2_config(layers: int, heads: int, hidden: int, positions: int) -> Any:
    """A GPT-2 of that shape, with its vocabulary; without dropout, as large models are fine-tuned."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=hidden,
        n_positions=positions,
        vocab_size=50257,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    transformers.logging.set_verbosity_error()  # GPT-2 does not name its loss, and says so every time
    return config


def joined_weights(model: nn.Module, names: Collection[str], keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Of the parameters `names`, those that transformers keeps in another form than checkpoints do: experts stacked
    into one, or renamed modules. Only forms in which the checkpoint's tensors lie one after another in it."""
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return {}  # before such forms there was nothing to join
    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, loading.WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, loading.WeightConverter)]
    found: dict[str, list[tuple[list[int], int, str]]] = {}
    for key in keys:
        target, pattern = loading.rename_source_key(key, renamings, converters)
        if target == key or target not in names:
            continue
        place = 0
        if pattern is not None:
            converter = next(item for item in converters if pattern in item.source_patterns)
            if not _lies_in_a_row(converter, loading):
                continue
            place = converter.source_patterns.index(pattern)
        numbers = [int(text) for text in re.findall(r"\d+", key)]
        found.setdefault(target, []).append((numbers, place, key))
    return {name: tuple(key for _, _, key in sorted(_by_expert(parts))) for name, parts in found.items()}


def _by_expert(parts: list[tuple[list[int], int, str]]) -> list[tuple[list[int], int, str]]:
    """Sortable: numbers that differ between the parts (the expert's; not, say, the 1 of `w1`) come first."""
    if len(parts) == 1:
        return parts
    columns = list(zip(*(numbers for numbers, _, _ in parts), strict=False))
    per_place: dict[int, set[tuple[int, ...]]] = {}
    for numbers, place, _ in parts:
        per_place.setdefault(place, set()).add(tuple(numbers))
    varying = [
        index
        for index in range(len(columns))
        if any(len({numbers[index] for numbers in group}) > 1 for group in per_place.values())
    ]
    return [([numbers[index] for index in varying], place, key) for numbers, place, key in parts]


def _lies_in_a_row(converter: Any, loading: Any) -> bool:
    """Whether a parameter is its checkpoint tensors one after another: experts stacked, and gate and up beside."""
    operations = converter.operations
    stacked = bool(operations) and isinstance(operations[0], loading.MergeModulelist) and operations[0].dim == 0
    if not stacked or len(converter.target_patterns) != 1:
        return False
    if len(operations) == 1:
        return len(converter.source_patterns) == 1
    beside = isinstance(operations[1], loading.Concatenate) and operations[1].dim == 1
    return len(operations) == 2 and beside


def cut_layers(config: Any, num_layers: int) -> None:
    """Make it the config of so many blocks."""
    config.num_hidden_layers = num_layers
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list):
            setattr(config, name, kinds[:num_layers])


def build_resident(directory: Path, auto_class: Any, dtype: torch.dtype, num_layers: int | None = None) -> nn.Module:
    """The same model wholly in memory, by transformers alone: what streaming is compared with."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if num_layers is not None:
        cut_layers(config, num_layers)
    transformers.logging.set_verbosity_error()  # it would list every tensor of the blocks left out
    transformers.logging.disable_progress_bar()
    found: nn.Module = auto_class.from_pretrained(directory, config=config, dtype=dtype, local_files_only=True)
    return found


def save_config(model: nn.Module, directory: Path, source: Path | None, dtype: torch.dtype | None = None) -> None:
    """Config, generation config, and what lies beside them in the source: the tokenizer and its template. `dtype`: what
    the weights were written in. Raises DiskError."""
    try:
        _save_config(model, directory, source, dtype)
    except OSError as error:
        raise DiskError(
            f"the model's config and tokenizer cannot be written to {directory}: {error.strerror}: free some room there"
        ) from error


def _save_config(model: nn.Module, directory: Path, source: Path | None, dtype: torch.dtype | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = getattr(model, "config", None)
    if isinstance(config, transformers.PretrainedConfig):
        config.dtype = dtype or next(model.parameters()).dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(directory)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(directory)
    if source is not None and source.resolve() != directory.resolve():
        for file in sorted(source.iterdir()):
            if file.name in _CARRIED or file.name.startswith("tokenizer"):
                shutil.copyfile(file, directory / f"{file.name}.new")
                os.replace(directory / f"{file.name}.new", directory / file.name)


def adapt(model: nn.Module, called: nn.Module, session: Session, label_smoothing: float) -> None:
    """Make a transformers model train well: no key-value cache, no checkpointing of its own, and logits that are never
    whole in memory. `called`: it, or what hands its batches on to it; that may be a part of what is trained. Raises
    UsageError where its loss cannot be smoothed."""
    if not isinstance(model, transformers.PreTrainedModel):
        return
    _compute_again_as_planned(model, session)
    _count_in_a_tensor(called, session)
    train_without_cache(model, session)
    if called is session.model:  # what a part is called with is not known before it is
        names = tuple(inspect.signature(called.forward).parameters)
        session.forwards.looks.append(
            Look(lambda args, kwargs: read_masks({**dict(zip(names, args, strict=False)), **kwargs}), masks_told)
        )
    session.side_outputs = captured
    install_loss(model, called, session, label_smoothing)


def _compute_again_as_planned(model: transformers.PreTrainedModel, session: Session) -> None:
    """And not also as the model was told: what was computed again would be once more."""
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    # Later versions of transformers have another name for it.
    name = "activation" if hasattr(model, "activation_checkpointing_disable") else "gradient"
    getattr(model, f"{name}_checkpointing_disable")()
    session.on_undo.append(getattr(model, f"{name}_checkpointing_enable"))


def _count_in_a_tensor(called: nn.Module, session: Session) -> None:
    """What a loss is divided by: as a number it would make every batch one of another kind, to be planned anew."""

    def put(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        count = kwargs.get("num_items_in_batch")
        if not isinstance(count, int):
            return None
        return args, {**kwargs, "num_items_in_batch": torch.tensor(count, device=session.device.torch_device)}

    session.on_undo.append(called.register_forward_pre_hook(put, with_kwargs=True, prepend=True).remove)
