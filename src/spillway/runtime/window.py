"""Views of a unit's parameters and gradients in the slots it computes from."""

import torch
from torch import nn

from spillway.model.binding import bind
from spillway.model.units import Unit
from spillway.store.homes import Homes


def weight_views(unit: Unit, slot: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every parameter of the unit as a view of the slot (uint8); no gradients."""
    return {place.name: unit.layout.view(place, slot) for place in unit.layout.places}


def leaves(unit: Unit, slot: torch.Tensor, grad_slot: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """`weight_views` as autograd leaves; gradients are summed in place into views of `grad_slot`, if given."""
    views = weight_views(unit, slot)
    for place in unit.layout.places:
        if place.trainable:
            leaf = views[place.name].requires_grad_()
            if grad_slot is not None:
                leaf.grad = unit.layout.view(place, grad_slot)
    return views


def bind_residents(units: tuple[Unit, ...], homes: Homes, with_grads: bool) -> None:
    """Parameters used outside any unit's forward are real parameters of the module tree, for a whole step. Their
    gradients begin at zero, unless they are summed on the device over several backwards."""
    for unit, home in zip(units, homes.units, strict=True):
        if unit.members or home.device_weight is None:
            continue
        grads = home.device_grad if with_grads else None
        if grads is not None and not (home.where.states == "device" and home.has_grad):
            grads.zero_()
        _bind_params(unit, home.device_weight, grads)


def unbind_residents(units: tuple[Unit, ...], placeholders: dict[str, nn.Parameter]) -> None:
    """The reverse."""
    for unit in units:
        if not unit.members:
            bind(unit, placeholders)


def _bind_params(unit: Unit, slot: torch.Tensor, grad_slot: torch.Tensor | None) -> None:
    views = weight_views(unit, slot)
    params: dict[str, torch.Tensor] = {}
    for place in unit.layout.places:
        param = nn.Parameter(views[place.name], place.trainable)
        if place.trainable and grad_slot is not None:
            param.grad = unit.layout.view(place, grad_slot)
        params[place.name] = param
    bind(unit, params)
