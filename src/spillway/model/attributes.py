"""What modules hold besides parameters and modules: attributes, and what is in those that are dicts, lists or sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

# Of a module: bound and unbound by others.
_NOT_KEPT = ("_parameters", "_modules")


@dataclass(frozen=True, slots=True)
class Attributes:
    """Of a module; and by name, what is in those that are containers and not empty."""

    values: dict[str, Any]
    contents: dict[str, list[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> "Attributes":
        own = vars(module)
        return cls(own.copy(), {name: _content(value) for name, value in own.items() if _holds(name, value) and value})

    def items(self) -> Iterator[Any]:
        """All that was found."""
        return chain(self.values.values(), *self.contents.values())

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether the module still has the same. Made for speed: it runs in every forward."""
        own = vars(module)
        if own.keys() != self.values.keys() or not all(map(is_, own.values(), self.values.values())):
            return False
        for name, value in own.items():
            if _holds(name, value) and value and not _are_same(_content(value), self.contents.get(name, [])):
                return False
        return all(map(own.__getitem__, self.contents))  # what was filled is not empty now

    def restore(self, module: nn.Module) -> None:
        """Let the module have them again."""
        own = vars(module)
        for name in own.keys() - self.values.keys():
            del own[name]
        for name, value in self.values.items():
            own[name] = value
            if _holds(name, value) and not isinstance(value, tuple):
                known = self.contents.get(name, [])
                if not _are_same(_content(value), known):
                    _refill(value, known)


def _holds(name: str, value: object) -> bool:
    return isinstance(value, (dict, list, set, tuple)) and name not in _NOT_KEPT


def _content(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _refill(container: Any, content: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(content[::2], content[1::2], strict=True))
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)
