"""Frozen dataclasses and named tuples to JSON and back."""

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain dicts, lists and scalars for a dataclass; fields at their default are kept, so a file explains itself."""
    names = _fields(value)
    if names and not isinstance(value, type):
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], data: Any) -> T:
    """The `kind` from what `to_json` gave. Unknown keys raise KeyError: the file is of another version."""
    return typing.cast(T, _decode(kind, data))


def _decode(kind: Any, data: Any) -> Any:
    names = _fields(kind)
    if names and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = set(data) - set(names)
        if unknown:
            raise KeyError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
        return kind(**{name: _decode(hints[name], item) for name, item in data.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_decode(arguments[0], item) for item in data)
        return tuple(_decode(part, item) for part, item in zip(arguments, data, strict=True))
    if origin is list:
        return [_decode(arguments[0], item) for item in data]
    if origin is dict:
        return {arguments[0](key): _decode(arguments[1], item) for key, item in data.items()}
    if origin in (types.UnionType, typing.Union):
        return None if data is None else _decode(next(part for part in arguments if part is not type(None)), data)
    return data


def _fields(value: Any) -> tuple[str, ...]:
    """Of a dataclass or a named tuple; none of anything else."""
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return getattr(value, "_fields", ()) if isinstance(value, (tuple, type)) else ()
