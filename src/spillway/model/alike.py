"""Calls that are alike: a model is the same block many times over, and what one of them does with fake tensors, all do.

Alike are calls of modules that are built alike, on arguments that are alike. That cannot be proven, for a forward is
code that may ask anything; so of the calls that are told to be alike the first six (what recurs mostly recurs within
six blocks), the eighth, the sixteenth and so on are made all the same, and where one does something else, none is taken
for another. Of kinds of modules that were alike in one forward, a later one, on other arguments, makes one call.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from spillway.model.attributes import Attributes
from spillway.model.operators import storage_of

# Of a module: told by what these hold, or different for each without a difference in what it does. (transformers gives
# every block its number, for caches.)
_APART = ("_parameters", "_modules", "layer_idx")
# Of a unit: stand in for its forward, which is looked at itself.
_STOOD_IN = ("forward", "_compiled_call_impl")
_FIRST = 6
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type, TreeSpec)

# Of a call: how its module and its function are made, and what it is given.
Key = tuple[Hashable, Hashable]


class _UnlikeAnything(Exception):
    """Nothing can be told of a call without making it."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that a call made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Made":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def again(self) -> torch.Tensor:
        tensor = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
        )
        return tensor.clone() if self.requires_grad else tensor  # what a call gives is no leaf, and may be written to


@dataclass(frozen=True, slots=True)
class Given:
    """What a call gave: tensors that it made, inputs of its own (by place), plain values; and what was noted of it."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    facts: Any

    def again(self, inputs: dict[int, torch.Tensor]) -> Any:
        """What a call like it would give with these inputs."""
        leaves = [
            leaf.again() if isinstance(leaf, _Made) else inputs[leaf.place] if isinstance(leaf, _Input) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class _Input:
    place: int


@dataclass(slots=True)
class AlikeCalls:
    """Of one forward. `modules`: by unit and path. `trusted`: kinds that were alike in forwards before."""

    modules: Mapping[tuple[int, str], nn.Module]
    trusted: Set[Hashable] = frozenset()
    is_used: bool = False  # a call was not made
    is_contradicted: bool = False  # what was taken for alike is not
    _kinds: dict[tuple[int, str], Hashable] = field(default_factory=dict)
    _found: dict[Key, tuple[Given | None, int]] = field(default_factory=dict)  # and how many asked for it

    def key(self, unit: int, member: str, function: Callable[..., Any], tree: Any, weights: set[int]) -> Key | None:
        """Calls of the same key are alike; `tree`: their arguments, `weights`: storages of parameters. None: unlike
        any other."""
        try:
            if (unit, member) not in self._kinds:
                self._kinds[unit, member] = _kind(self.modules[unit, member])
            own = _fixed(inspect.unwrap(function))
            return (self._kinds[unit, member], own), (_arguments(tree, weights), _modes())
        except (_UnlikeAnything, RecursionError):
            return None

    def known(self, key: Key | None) -> Given | None:
        """What a call gives that need not be made."""
        if key is None or key not in self._found:
            return None
        given, times = self._found[key]
        self._found[key] = given, times + 1
        if given is None or (key[0] not in self.trusted and _is_made_again(times)):
            return None
        self.is_used = True
        return given

    def note(self, key: Key | None, given: Given | None) -> None:
        """What a call gave that was made; None where no other can give the same."""
        if key is None:
            return
        if key not in self._found:
            self._found[key] = given, 1
            return
        known, _ = self._found[key]
        self.is_contradicted |= known is not None and known != given

    def found_alike(self) -> set[Hashable]:
        """Kinds of which several calls were alike and none spoke against it."""
        return {kind for (kind, _), (given, times) in self._found.items() if given is not None and times > 1}

    def before(self, unit: int, member: str, tree: Any) -> "Before":
        """Look at what a call may change."""
        modules = list(self.modules[unit, member].modules())
        return Before(modules, [Attributes.of(module) for module in modules], tree, tree_flatten(tree)[1])


def _is_made_again(times: int) -> bool:
    return times < _FIRST or not times & (times + 1)


@dataclass(frozen=True, slots=True)
class Before:
    """What modules held and what they were given, before a call."""

    modules: list[nn.Module]
    attributes: list[Attributes]
    tree: Any
    spec: TreeSpec

    def is_changed(self) -> bool:
        """Whether the call gave something by another way than what it returned."""
        if tree_flatten(self.tree)[1] != self.spec:
            return True
        pairs = zip(self.modules, self.attributes, strict=True)
        return any(not known.are_those_of(module) for module, known in pairs)


def _arguments(tree: Any, weights: set[int]) -> Hashable:
    leaves, spec = tree_flatten(tree)
    seen: dict[int, int] = {}
    lying: dict[int, int] = {}
    parts: list[Hashable] = [spec]
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            parts.append((type(leaf), _value(leaf)))
            continue
        if not isinstance(leaf, FakeTensor) or leaf.layout is not torch.strided:
            raise _UnlikeAnything
        storage = storage_of(leaf)
        where = seen.setdefault(id(leaf), place), lying.setdefault(storage, place), storage in weights
        parts.append((_Made.of(leaf), where))
    return tuple(parts)


def given_by(inputs: dict[int, torch.Tensor], result: Any, facts: Any, weights: set[int]) -> Given | None:
    """What a call gave; None where an output lies in the memory of another, of an input or of weights, or is no plain
    value."""
    leaves, spec = tree_flatten(result)
    places = {id(tensor): place for place, tensor in reversed(inputs.items())}
    taken = weights | {storage_of(tensor) for tensor in inputs.values()}
    parts: list[Any] = []
    for leaf in leaves:
        if id(leaf) in places:
            parts.append(_Input(places[id(leaf)]))
        elif not isinstance(leaf, torch.Tensor):
            try:
                parts.append(_value(leaf))
            except _UnlikeAnything:
                return None
        elif not isinstance(leaf, FakeTensor) or leaf.layout is not torch.strided or storage_of(leaf) in taken:
            return None
        else:
            taken.add(storage_of(leaf))
            parts.append(_Made.of(leaf))
    return Given(tuple(parts), spec, facts)


def _modes() -> Hashable:
    return tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _value(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, _PLAIN):
        return leaf
    raise _UnlikeAnything  # it may change, or be changed


def _kind(module: nn.Module) -> Hashable:
    """How a module is built: of which modules, parameters and attributes."""
    return tuple(
        (
            name,
            type(part),
            tuple((key, _parameter(param)) for key, param in part._parameters.items()),
            tuple(
                (key, _held(key, value))
                for key, value in vars(part).items()
                if key not in _APART and (name or key not in _STOOD_IN)
            ),
        )
        for name, part in module.named_modules()
    )


def _parameter(param: nn.Parameter | None) -> Hashable:
    return None if param is None else (param.shape, param.dtype, param.requires_grad)


def _held(key: str, value: object) -> Hashable:
    if isinstance(value, dict) and "_hooks" in key:  # by numbers that every hook has of its own
        return _each(value.values())
    return _fixed(value)


def _fixed(value: object) -> Hashable:
    """Equal for what is alike: by value, by what a function is made of, or by identity."""
    if value is None or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _Made.of(value) if value.layout is torch.strided else id(value)
    if isinstance(value, dict):
        return _each(part for item in value.items() for part in item)
    if isinstance(value, (tuple, list)):
        return type(value), _each(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_fixed, value))
    if isinstance(value, MethodType):
        return _fixed(value.__func__)
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return value.__code__, _each(value.__defaults__ or ()), _each(held)
    if isinstance(value, partial):
        return _fixed(value.func), _each(value.args), _fixed(value.keywords)
    return id(value)


def _each(values: Iterable[object]) -> Hashable:
    return tuple(map(_fixed, values))
