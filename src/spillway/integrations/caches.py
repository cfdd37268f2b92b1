"""Key-value caches of transformers in training: a backward that computes a block again would add its keys once more."""

import inspect
from typing import Any

import torch
import transformers
from torch import nn

from spillway.runtime.session import Session
from spillway.spec.errors import UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def train_without_cache(model: transformers.PreTrainedModel, session: Session) -> None:
    """A forward with gradients makes none; and where an architecture makes one all the same, no unit fills it."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel) and getattr(part.config, "use_cache", False):
            _turn_off(part, session)
    for unit in session.units:
        for _, member in unit.members:
            session.on_undo.append(member.register_forward_pre_hook(_leave_out, with_kwargs=True).remove)


def _turn_off(model: transformers.PreTrainedModel, session: Session) -> None:
    signature = inspect.signature(model.forward)
    if "use_cache" not in signature.parameters:
        return

    def turn_off(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not torch.is_grad_enabled():
            return None
        given = signature.bind_partial(*args, **kwargs).arguments
        if given.get("use_cache"):
            raise UsageError(
                "use_cache=True was asked for in a forward with gradients, whose backward would add to the cache once "
                "more: leave it out, or run the forward under torch.no_grad()"
            )
        # A model around this one hands its own use_cache=None on, for which the config then answers.
        is_settled = given.get("use_cache") is False or ("use_cache" in given and "use_cache" not in kwargs)
        return None if is_settled else (args, {**kwargs, "use_cache": False})

    session.on_undo.append(model.register_forward_pre_hook(turn_off, with_kwargs=True).remove)


def _leave_out(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Without the caches that a unit is given: nothing is in them, and nobody reads them afterwards."""
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, transformers.Cache)]
    if not caches or not torch.is_grad_enabled():
        return None
    if any(cache.get_seq_length() for cache in caches):
        raise UsageError(
            f"{type(module).__name__} was given a cache with keys in a forward with gradients, whose backward would "
            f"add to it once more: leave the cache out, or run the forward under torch.no_grad()"
        )
    return tuple(map(_no_cache, args)), {name: _no_cache(value) for name, value in kwargs.items()}


def _no_cache(value: Any) -> Any:
    return None if isinstance(value, transformers.Cache) else value
