"""What transformers takes from modules within blocks while a model runs: router logits, attention weights. Its hooks
put them into a collector; the unit returns them besides, so that a loss may depend on them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from spillway.runtime.unit import returned_alone

try:  # there is no public way to know what is collected
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None


def captured(original: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """SideOutputs: what is collected within a unit, while something is."""
    collector = None if _active_collector is None else _active_collector.get()
    if not collector:
        return returned_alone(original)
    told = {key: value for key, value in collector.items() if not isinstance(value, list)}
    lengths = {key: len(value) for key, value in collector.items() if isinstance(value, list)}

    @wraps(original)
    def collecting(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Any]]]:
        # Hooks look at how much was collected before.
        own = {key: [None] * length for key, length in lengths.items()}
        token = _active_collector.set({**told, **own})
        try:
            result = original(*args, **kwargs)
        finally:
            _active_collector.reset(token)
        return result, {key: found[lengths[key] :] for key, found in own.items()}

    def hand_on(result: tuple[Any, dict[str, list[Any]]]) -> Any:
        returned, found = result
        for key, more in found.items():
            collector[key] += more
        return returned

    return collecting, hand_on
