"""Adapters of peft on a model that streams: the base comes from its directory and is never written, only adapters are
trained and saved. The only file that imports peft."""

from pathlib import Path
from typing import Any, NoReturn

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from spillway.runtime.session import Session
from spillway.spec.errors import DiskError, UsageError

# Ways to start LoRA that do not look at the weights of the base, which are not in memory.
_BLIND_STARTS = (True, False, "gaussian")
_MERGING = ("merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")


def attach(model: nn.Module, adapter: peft.PeftConfig | Path) -> peft.PeftModel:
    """The model with LoRA adapters that have weights, which peft leaves without any on a base that has none: as a
    config asks for, or as saved in a directory. Raises UsageError for other adapters, for a start that needs the
    weights of the base, and for a directory that holds none that fits."""
    saved = {} if isinstance(adapter, peft.PeftConfig) else _read_saved(adapter)
    config = adapter if isinstance(adapter, peft.PeftConfig) else peft.PeftConfig.from_pretrained(str(adapter))
    if not isinstance(config, peft.LoraConfig):
        raise UsageError(
            f"a {type(config).__name__} is no LoRA adapter: build the model in memory with peft for others"
        )
    config.inference_mode = False
    _check_start(model, config)
    with torch.random.fork_rng(devices=[]):  # what it draws for weights that it then moves to the meta device
        result = peft.get_peft_model(model, config)
    for module in result.modules():
        if isinstance(module, LoraLayer):
            _fill(module, config.init_lora_weights)
        elif isinstance(module, ModulesToSaveWrapper) and saved:
            for copy in module.modules_to_save.values():
                _in_memory(copy)
    if saved:
        outcome = peft.set_peft_model_state_dict(result, saved)
        missing = [name for name in outcome.missing_keys if ".lora_" in name or ".modules_to_save." in name]
        if missing or outcome.unexpected_keys:
            raise UsageError(f"{adapter} does not fit this model: {(missing or outcome.unexpected_keys)[0]} is amiss")
    return result


def _read_saved(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter. Raises UsageError."""
    path = directory / "adapter_model.safetensors"
    if not path.exists() or not (directory / "adapter_config.json").exists():
        raise UsageError(f"{directory} holds no adapter: adapter_config.json or {path.name} is missing")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read as safetensors ({error}): save it again") from error


def _check_start(model: nn.Module, config: peft.LoraConfig) -> None:
    needs_base = config.init_lora_weights not in _BLIND_STARTS or config.use_dora
    if needs_base and any(param.is_meta for param in model.parameters()):
        start = "use_dora" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
        raise UsageError(
            f"{start} starts from the weights of the base model, which are not in memory: choose plain LoRA with "
            f"init_lora_weights=True or 'gaussian'"
        )


def _fill(layer: Any, start: bool | str) -> None:
    """Weights in memory for the adapters of a layer that have none."""
    holders = [child for child in layer.children() if isinstance(child, (nn.ModuleDict, nn.ParameterDict))]
    for adapter in layer.r:
        empty = [holder for holder in holders if adapter in holder and _is_meta(holder[adapter])]
        for holder in empty:
            made = holder[adapter] = _in_memory(holder[adapter])
            _draw(made)
        if empty:
            layer.reset_lora_parameters(adapter, start)
            for holder in empty:
                _round_to(layer.get_base_layer().weight.dtype, holder[adapter])


@torch.no_grad()
def _draw(made: Any) -> None:
    """The random numbers that peft's constructors draw, before what they make is given its first weights: so a seed
    gives the same adapters as in memory."""
    if isinstance(made, nn.Parameter):
        made.normal_()
    elif hasattr(made, "reset_parameters"):
        made.reset_parameters()


@torch.no_grad()
def _round_to(dtype: torch.dtype, made: Any) -> None:
    """peft gives adapters the base's dtype before it trains them in float32."""
    for param in [made] if isinstance(made, nn.Parameter) else made.parameters():
        param.copy_(param.to(dtype))


def _is_meta(part: nn.Module | nn.Parameter) -> bool:
    params = [part] if isinstance(part, nn.Parameter) else part.parameters()
    return any(param.is_meta for param in params)


def _in_memory(part: Any) -> Any:
    if isinstance(part, nn.Parameter):
        return nn.Parameter(torch.zeros_like(part, device="cpu"), part.requires_grad)
    part.to_empty(device="cpu")
    for param in part.parameters():
        nn.init.zeros_(param)
    return part


def copied_parameters(model: peft.PeftModel) -> dict[int, nn.Parameter]:
    """Of whole modules that are trained beside an adapter (`modules_to_save`): by their ids the copies of parameters,
    with the parameter each starts from."""
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    return {
        id(copied): original
        for wrapper in wrappers
        for copy in wrapper.modules_to_save.values()
        for copied, original in zip(copy.parameters(), wrapper.original_module.parameters(), strict=True)
    }


def refuse_merging(model: peft.PeftModel, session: Session) -> None:
    """The weights that adapters would be merged into rest in the store."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the base of this model rests in the store, adapters cannot be merged into it: save them with "
            "spillway.save_pretrained(model, directory) and merge them into the model in memory"
        )

    def undo() -> None:
        for name in _MERGING:
            delattr(model, name)

    for name in _MERGING:
        setattr(model, name, refuse)
    session.on_undo.append(undo)


def adapter_parameters(model: peft.PeftModel) -> list[str]:
    """Names of the parameters that belong to adapters, as peft has it."""
    params = dict(model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    found: list[str] = []
    for adapter in model.peft_config:
        chosen = peft.get_peft_model_state_dict(model, dict(params), adapter, save_embedding_layers=False)
        found += [names[id(param)] for param in chosen.values() if id(param) in names]
    return found


def save_adapters(model: peft.PeftModel, weights: dict[str, torch.Tensor], directory: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which `peft.PeftModel.from_pretrained` loads. `weights`:
    of `adapter_parameters`. Raises DiskError."""
    state = {**dict(model.named_parameters()), **weights}
    try:
        peft.PeftModel.save_pretrained(model, str(directory), save_embedding_layers=False, state_dict=state)
    except OSError as error:
        raise DiskError(f"the adapter cannot be written to {directory}: {error.strerror or error}") from error
