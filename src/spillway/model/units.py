"""Finds the units of any nn.Module."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from spillway.spec.errors import UsageError
from spillway.spec.state import EXACT, StateFormat
from spillway.store.layout import UnitLayout, lay_out


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """A place in the module tree where a parameter is looked up; tied parameters have several."""

    module: nn.Module
    attribute: str
    name: str  # of the parameter, canonical: the first of its names


@dataclass(frozen=True, slots=True)
class Unit:
    """One or more modules whose parameters are streamed as a whole. More than one where they share parameters."""

    name: str
    members: tuple[tuple[str, nn.Module], ...]  # path and module; empty for parameters outside any unit's forward
    slots: tuple[ParameterSlot, ...]
    layout: UnitLayout


def find_units(model: nn.Module, state_format: StateFormat = EXACT) -> tuple[Unit, ...]:
    """Every child of an outermost ModuleList (or of a Sequential) is a unit, and so is every other module with
    parameters below which there is no such list. Modules that share parameters are one unit. Parameters held directly
    by a module above units (or in a ParameterList of it) form the last unit, without members. `state_format`: what the
    optimizer keeps of each.

    Raises UsageError for a model without parameters or with parameters that cannot be trained as they are.
    """
    blocks = list(_blocks("", model))
    groups = _join_shared(blocks)
    covered = {id(module) for _, root in blocks for module in root.modules()}
    loose = [(path, module) for path, module in model.named_modules() if id(module) not in covered]
    names = {id(param): name for name, param in model.named_parameters()}
    if not names:
        raise UsageError(f"{type(model).__name__} has no parameters to train")
    units = [
        _unit(", ".join(path or "model" for path, _ in group), tuple(group), group, names, state_format)
        for group in groups
    ]
    # A unit owns what its modules hold; a parameter also used above units is bound for the whole step instead.
    outside = [(path, module) for path, module in loose if module._parameters]
    if outside:
        units.append(_unit("outside of units", (), outside, names, state_format))
    _refuse_overlap(units)
    return tuple(unit for unit in units if unit.layout.places)


def _blocks(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not any(_is_list(part) for part in module.modules()):
        yield path, module
        return
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if not _has_parameters(child) or isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            continue  # those have no forward: they are held by this module
        if _is_list(module) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child_path, child
        else:
            yield from _blocks(child_path, child)


def _is_list(module: nn.Module) -> bool:
    """Whether the children of this module are blocks: any list of modules, or a Sequential of alike composite ones."""
    blocks = [child for child in module.children() if _has_parameters(child)]
    if isinstance(module, nn.Sequential):
        composite = all(any(True for _ in block.children()) for block in blocks)
        return len(blocks) > 1 and composite and len({type(block) for block in blocks}) == 1
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and bool(blocks)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _join_shared(blocks: list[tuple[str, nn.Module]]) -> list[list[tuple[str, nn.Module]]]:
    """Blocks in order, those that share a parameter together, a module met twice only once."""
    groups: list[tuple[set[int], list[tuple[str, nn.Module]]]] = []
    for path, module in blocks:
        params = {id(param) for param in module.parameters()}
        shared = [group for group in groups if group[0] & params]
        if not shared:
            groups.append((params, [(path, module)]))
            continue
        first = shared[0]
        for other in shared[1:]:
            first[0].update(other[0])
            first[1].extend(other[1])
            groups.remove(other)
        first[0].update(params)
        if all(module is not known for _, known in first[1]):
            first[1].append((path, module))
    return [members for _, members in groups]


def _unit(
    name: str,
    members: tuple[tuple[str, nn.Module], ...],
    roots: list[tuple[str, nn.Module]],
    names: dict[int, str],
    state_format: StateFormat,
) -> Unit:
    slots: list[ParameterSlot] = []
    params: dict[str, nn.Parameter] = {}
    for _, root in roots:
        for module in root.modules() if members else (root,):
            for attribute, param in module._parameters.items():
                if param is not None:
                    slots.append(ParameterSlot(module, attribute, names[id(param)]))
                    params[names[id(param)]] = param
    described = [(key, tuple(param.shape), param.dtype, param.requires_grad) for key, param in params.items()]
    try:
        layout = lay_out(described, state_format)
    except ValueError as error:
        raise UsageError(f"{name} cannot be trained: {error}") from error
    return Unit(name, members, tuple(slots), layout)


def _refuse_overlap(units: list[Unit]) -> None:
    owner: dict[str, str] = {}
    for unit in units:
        for place in unit.layout.places:
            if owner.setdefault(place.name, unit.name) != unit.name:
                raise UsageError(
                    f"{place.name} is held both by {owner[place.name]} and by {unit.name}, which is not streamed as "
                    f"a unit; move it into a module of its own"
                )


def is_compiled(unit: Unit) -> bool:
    """Whether a part of it runs compiled: whole, or by a forward that was."""
    modules = (module for _, member in unit.members for module in member.modules())
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in modules
    )
