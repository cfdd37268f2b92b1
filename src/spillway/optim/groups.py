"""Parameter groups as torch.optim takes them, of a model whose parameters are about to move."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spillway.optim.config import SGD, Rule, check_hyper
from spillway.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """Parameters by every name that each has in the model, and what is set for them alone."""

    params: tuple[frozenset[str], ...]
    options: dict[str, Any]


def named_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]], settings: Rule) -> tuple[NamedGroup, ...]:
    """The user's groups. Raises UsageError for parameters that are not the model's, or in two groups, and for options
    that this optimizer does not have."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    seen: set[int] = set()
    return tuple(_named_group(number, group, names, seen, settings) for number, group in enumerate(groups))


def _named_group(
    number: int, group: Mapping[str, Any], names: Mapping[int, set[str]], seen: set[int], settings: Rule
) -> NamedGroup:
    where = f"parameter group {number}"
    options = {key: value for key, value in group.items() if key != "params"}
    allowed = _options_of(settings)
    for key in options:
        if key not in allowed:
            raise UsageError(f"{where} sets {key}, which {type(settings).__name__} has not: {', '.join(allowed)}")
    params = group.get("params", ())
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    if not listed:
        raise UsageError(f"{where} has no parameters: give them as 'params'")
    for param in listed:
        if id(param) not in names:
            raise UsageError(f"{where} has a parameter that is not the model's: make groups of model.parameters()")
        if id(param) in seen:
            raise UsageError(f"{sorted(names[id(param)])[0]} is in more than one parameter group")
        seen.add(id(param))
    if "momentum" in options:
        options["betas"] = (options.pop("momentum"), 0.0)
    try:
        check_hyper(options)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return NamedGroup(tuple(frozenset(names[id(param)]) for param in listed), options)


def _options_of(settings: Rule) -> Sequence[str]:
    if isinstance(settings, SGD):
        return ("lr", "weight_decay", "momentum")
    return ("lr", "weight_decay", "betas", *(("eps",) if settings.rule == "adamw" else ()))
