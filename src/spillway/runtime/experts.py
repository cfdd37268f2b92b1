"""Mixtures of experts in forwards of a few tokens: of such a unit only the experts that the router picks are fetched,
once it has."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from spillway.model.units import Unit, is_compiled
from spillway.store.layout import TensorPlace
from spillway.store.placed import PlacedStore

# Of the experts: where more are likely to be picked, whole units that are fetched ahead are faster.
_FEW = 0.5


@dataclass(frozen=True, slots=True)
class _Experts:
    """A module whose parameters are stacked: one slice for each expert, of which a token picks `per_token`."""

    module: nn.Module
    count: int
    per_token: int
    places: tuple[TensorPlace, ...]

    def likely_share(self, tokens: int) -> float:
        """Of the experts, how many so many tokens pick, if all are picked alike."""
        return 1 - (1 - self.per_token / self.count) ** tokens

    def picked_in(self, given: Any) -> list[int]:
        """Those that a call of the module is told to use; all of them where it is told in a way we do not know."""
        leaves = (leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor))
        whole = [leaf for leaf in leaves if leaf.dtype in (torch.int64, torch.int32)]
        if len(whole) != 1 or not whole[0].dim() or whole[0].shape[-1] != self.per_token:
            return list(range(self.count))
        return [number for number in whole[0].unique().tolist() if 0 <= number < self.count]


class RoutedExperts:
    """Which units have them, and how those come."""

    def __init__(self, units: tuple[Unit, ...], store: PlacedStore) -> None:
        self._units = units
        self._store = store
        self._of = {index: found for index, unit in enumerate(units) if (found := _find(unit)) is not None}
        self.are_picked = False  # in the forward under way

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward without gradients has begun on this batch."""
        tokens = _tokens(args, kwargs)
        self.are_picked = bool(self._of) and all(each.likely_share(tokens) <= _FEW for each in self._of.values())

    def end(self) -> None:
        """It is over."""
        self.are_picked = False

    @contextmanager
    def fetched(self, unit: int, beside_step: bool) -> Iterator[torch.Tensor]:
        """The unit in a buffer on the device. Where experts are picked in this forward, those of the unit come inside,
        when they are called."""
        experts = self._of.get(unit) if self.are_picked and not beside_step else None
        if experts is None:
            yield self._store.fetch(unit, beside_step)
            return
        layout = self._units[unit].layout
        stacked = sorted(layout.byte_range(place) for place in experts.places)
        slot = self._store.fetch(unit, ranges=_between(stacked, layout.weight_bytes))
        hook = experts.module.register_forward_pre_hook(
            lambda _, args, kwargs: self._fetch_picked(unit, experts, slot, (args, kwargs)), with_kwargs=True
        )
        try:
            yield slot
        finally:
            hook.remove()

    def _fetch_picked(self, unit: int, experts: _Experts, slot: torch.Tensor, given: Any) -> None:
        numbers = experts.picked_in(given)
        ranges = []
        for place in experts.places:
            start, stop = self._units[unit].layout.byte_range(place)
            size = (stop - start) // experts.count
            ranges += [(start + size * number, start + size * (number + 1)) for number in numbers]
        self._store.fetch(unit, ranges=ranges, into=slot)


def _find(unit: Unit) -> _Experts | None:
    """The experts of a unit whose parameters are stacked, one slice for each, as transformers has them; None for any
    other unit, and for a compiled one: what was compiled without our hook may be run in its place."""
    if is_compiled(unit):
        return None
    places = {place.name: place for place in unit.layout.places}
    tops = [getattr(module, "top_k", None) for _, member in unit.members for module in member.modules()]
    per_token = next((top for top in tops if isinstance(top, int)), 0)
    for module in dict.fromkeys(slot.module for slot in unit.slots):
        count = getattr(module, "num_experts", None)
        own = [places[slot.name] for slot in unit.slots if slot.module is module and slot.name in places]
        is_stacked = all(len(place.shape) > 1 and place.shape[0] == count for place in own)
        names = {place.name for place in own}
        is_shared = any(slot.name in names and slot.module is not module for slot in unit.slots)
        is_deep = any(len(place.shape) > 2 for place in own)
        if per_token and isinstance(count, int) and is_stacked and is_deep and not is_shared:
            return _Experts(module, count, per_token, tuple(own))
    return None


def _between(taken: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What lies before, between and after these ranges."""
    found, at = [], 0
    for start, stop in [*taken, (end, end)]:
        if start > at:
            found.append((at, start))
        at = stop
    return found


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of a forward's batch. The smallest tensor of whole numbers tells, where none has the usual name: a mask covers
    what is in the cache, too."""
    ids = kwargs.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    whole = [leaf.numel() for leaf in tensors if not leaf.is_floating_point() and leaf.dim() == 2]
    rows = [leaf.numel() // leaf.shape[-1] for leaf in tensors if leaf.is_floating_point() and leaf.dim() > 1]
    return min(whole or rows or [1 << 30])
