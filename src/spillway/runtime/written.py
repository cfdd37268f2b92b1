"""What a block writes into the lists and dicts that it is given. They are made anew whenever it is computed, so what it
writes becomes a part of what it returns, and is written into the caller's afterwards."""

from collections import UserDict
from collections.abc import Callable, Iterator
from functools import wraps
from operator import is_
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_map

from spillway.spec.defaults import as_it_is

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Container = list[Any] | dict[Any, Any] | UserDict[Any, Any]


def writes_returned(
    function: Callable[..., Any], arguments: Arguments
) -> tuple[Callable[..., Any], Arguments, Callable[[Any], Any]]:
    """A function that leaves the lists and dicts among its arguments as they are and also returns what they would hold
    now; the arguments to call it with, whose lists and dicts nobody else writes to; and what takes that out of its
    result and writes it into the caller's. What cannot be told by it (a list in two places, one within another that
    changes) is written as ever."""
    containers = list(_containers(arguments))
    if not containers or len({id(container) for container in containers}) < len(containers):
        return function, arguments, as_it_is

    @wraps(function)
    def returning(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        given = list(_containers((args, kwargs)))
        before = [_copied(container) for container in given]
        result = function(*args, **kwargs)
        return result, [_taken(*pair) for pair in zip(given, before, strict=True)]

    def hand_on(returned: tuple[Any, list[Any]]) -> Any:
        result, written = returned
        for container, content in zip(containers, written, strict=True):
            if content is not None:
                _fill(container, content)
        return result

    return returning, tree_map(as_it_is, arguments), hand_on


def _containers(arguments: Arguments) -> Iterator[Container]:
    """The lists and dicts in it that may be written to, but for the one that keyword arguments come in."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        yield from _within(value)


def _within(value: Any) -> Iterator[Container]:
    if isinstance(value, (list, dict, UserDict)):
        _make_known(type(value))
        yield value
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _within(part)
    elif isinstance(value, (dict, UserDict)):
        for part in value.values():
            yield from _within(part)


def _make_known(kind: type) -> None:
    """To PyTorch, which otherwise takes it for one value: the keys that layers of Gemma 3n and 4 share."""
    if issubclass(kind, UserDict) and kind not in SUPPORTED_NODES:
        register_pytree_node(
            kind,
            lambda given: (list(given.values()), list(given)),
            lambda values, keys: kind(zip(keys, values, strict=True)),
        )


def _copied(container: Container) -> Any:
    return list(container) if isinstance(container, list) else dict(container)


def _taken(container: Container, before: Any) -> Any:
    """What was written is taken out again, and given: the whole content. None where nothing was."""
    now = _copied(container)
    if _is_same(now, before) or any(True for value in _values(now) for _ in _within(value)):
        return None
    _fill(container, before)
    return now


def _is_same(one: Any, other: Any) -> bool:
    same_places = len(one) == len(other) if isinstance(one, list) else list(one) == list(other)
    return same_places and all(map(is_, _values(one), _values(other)))


def _values(content: Any) -> Any:
    return content if isinstance(content, list) else content.values()


def _fill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)
