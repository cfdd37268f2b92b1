"""Views of a unit's parameters and gradients in the slots it computes from."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spillway.model.binding import bind
from spillway.model.units import Unit
from spillway.store.homes import Homes


def weight_views(unit: Unit, slot: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every parameter of the unit as a view of the slot (uint8); no gradients."""
    return {place.name: unit.layout.view(place, slot) for place in unit.layout.places}


def leaves(unit: Unit, slot: torch.Tensor) -> dict[str, torch.Tensor]:
    """`weight_views` as autograd leaves."""
    views = weight_views(unit, slot)
    for place in unit.layout.places:
        views[place.name].requires_grad_(place.trainable)
    return views


def fake_leaves(unit: Unit, device: torch.device) -> dict[str, torch.Tensor]:
    """Parameters like those of `leaves`, for use under a FakeTensorMode: they lie in no slot."""
    return {
        place.name: nn.Parameter(torch.empty(place.shape, dtype=place.dtype, device=device), place.trainable)
        for place in unit.layout.places
    }


def sums_of(leaves: Iterable[torch.Tensor]) -> list[GradientEdge]:
    """The nodes of autograd that sum the gradients of these leaves, made now. Micro-batches that are computed beside
    each other need one and the same while they are: it sums where (on a GPU: on which stream) it was made. To be held
    no longer, for each holds its leaf."""
    return [get_gradient_edge(leaf) for leaf in leaves if leaf.requires_grad]


class Gradients:
    """Where the gradients of a unit go while one of its calls is differentiated: views of a slot (uint8). If it is
    fresh the first gradient of a parameter replaces what lies there, and only the following ones are added."""

    def __init__(self, unit: Unit, slot: torch.Tensor, is_fresh: bool) -> None:
        self._slot = slot
        self._views = {place.name: unit.layout.view(place, slot) for place in unit.layout.places if place.trainable}
        self._missing = set(self._views) if is_fresh else set()
        self._gaps = unit.layout.grad_gaps if is_fresh else []

    def start_at_zero(self) -> None:
        """Every gradient is added, the first one as well: for calls that do so piece by piece."""
        for name in self._missing:
            self._views[name].zero_()
        self._missing.clear()

    def collect(self, name: str, leaf: torch.Tensor) -> None:
        """Take the gradients that autograd finds for this leaf, the parameter of that name."""
        leaf.grad = None if name in self._missing else self._views.get(name)
        if name in self._missing:
            leaf.register_post_accumulate_grad_hook(lambda found: self._take_first(name, found))

    def finish(self) -> None:
        """What got no gradient has one of zero, and so has what lies between parameters."""
        self.start_at_zero()
        for start, stop in self._gaps:
            self._slot[start:stop].zero_()

    def _take_first(self, name: str, leaf: torch.Tensor) -> None:
        if name in self._missing and leaf.grad is not None:
            self._missing.discard(name)
            view = self._views[name]
            view.copy_(leaf.grad)
            leaf.grad = view


def bind_residents(
    units: tuple[Unit, ...],
    residents: Iterable[int],
    homes: Homes,
    on_gradient: Callable[[torch.Tensor], None] | None = None,
) -> list[GradientEdge]:
    """Parameters used outside of their units' calls are real parameters of the module tree, for a whole step. Their
    gradients begin at zero, unless they are summed on the device over several backwards; `on_gradient` hears of each
    in a backward, and without it there are none. Returns what sums them, to be held meanwhile."""
    sums: list[GradientEdge] = []
    for index in residents:
        unit, home = units[index], homes.units[index]
        if home.device_weight is None:
            continue
        grads = None if on_gradient is None else home.device_grad
        if grads is not None and not (home.where.states == "device" and home.has_grad):
            grads.zero_()
        params = _bind_params(unit, home.device_weight, grads)
        if on_gradient is not None:
            sums += sums_of(params)
            for param in params:
                if param.requires_grad:
                    param.register_hook(on_gradient)
    return sums


def unbind_residents(units: tuple[Unit, ...], residents: Iterable[int], placeholders: dict[str, nn.Parameter]) -> None:
    """Give the units that `bind_residents` bound their placeholders back."""
    for index in residents:
        bind(units[index], placeholders)


def _bind_params(unit: Unit, slot: torch.Tensor, grad_slot: torch.Tensor | None) -> Iterable[torch.Tensor]:
    views = weight_views(unit, slot)
    params: dict[str, torch.Tensor] = {}
    for place in unit.layout.places:
        param = nn.Parameter(views[place.name], place.trainable)
        if place.trainable and grad_slot is not None:
            param.grad = unit.layout.view(place, grad_slot)
        params[place.name] = param
    bind(unit, params)
    return params.values()
