"""What calls take while they compute, measured on tensors like theirs."""

import logging
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from spillway.model.binding import bound
from spillway.model.fake_products import tell_grouped_products
from spillway.model.layouts import order_of
from spillway.model.profile import CallRecord, CallShape, UnitCall, tensors_by_place
from spillway.model.units import Unit
from spillway.model.work import SLACK, MeasuredWorks, Work, measure_work
from spillway.runtime.buffers import nothing_kept
from spillway.runtime.calls import generators_in, rng_kept
from spillway.runtime.device import Device
from spillway.runtime.window import fake_leaves
from spillway.spec.errors import UsageError, required

# Where an operator refuses what it is given, it is told here before it is tried in another way.
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class Works:
    """Of the calls of one model, those of a kind measured once for many sizes."""

    def __init__(self, units: tuple[Unit, ...], device: Device, placeholders: dict[str, nn.Parameter]) -> None:
        self._units = units
        self._device = device.torch_device
        self._device_kind = device.kind
        self._placeholders = placeholders
        self._measured = MeasuredWorks()

    def of(self, call: CallRecord, shape: CallShape, slack: float, residents: frozenset[int]) -> Work:
        """What a micro-batch of a call takes. `slack`: see MeasuredWorks. `residents`: units whose parameters are
        there for every call."""
        if call.work is not None:
            return call.work
        sizes = tuple(tuple(size) for size in _cut_sizes(call, shape).values())
        kind = self._kind(call.unit, call.kind, call.inputs)
        return self._measured.of(kind, sizes, slack, partial(self._measure, call, shape, residents))

    def of_real(self, call: UnitCall, params: dict[str, torch.Tensor]) -> Work:
        """What a call on real data takes with these parameters: it is computed, forward and backward, by itself."""
        inputs = tensors_by_place((call.args, call.kwargs))
        kind = self._kind(call.unit, call.kind, inputs), call.chunk_rows
        sizes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        return self._measured.of(kind, sizes, SLACK, partial(self._measure_real, call, params))

    def _kind(self, unit: int, kind: str, inputs: dict[int, torch.Tensor]) -> Hashable:
        """Equal for calls that take as much while they compute if their inputs are as large."""
        params = tuple((place.shape, place.dtype, place.trainable) for place in self._units[unit].layout.places)
        given = ((place, order_of(tensor), tensor.dtype, tensor.requires_grad) for place, tensor in inputs.items())
        return params, kind, tuple(given)

    def _measure(self, call: CallRecord, shape: CallShape, residents: frozenset[int]) -> Work:
        again = required(call.again, "a call on real data was measured when it was made")
        own = self._units[call.unit]
        with on_fakes(self._device, _modules(own)), ExitStack() as stack:
            params = fake_leaves(own, self._device)
            stack.enter_context(bound(own, params, self._placeholders))
            for unit in (self._units[index] for index in residents):
                stack.enter_context(bound(unit, fake_leaves(unit, self._device), self._placeholders))
            leaves, spec = tree_flatten((again.args, again.kwargs))
            for place, size in _cut_sizes(call, shape).items():
                tensor = call.inputs[place]
                like = torch.empty_permuted(size, order_of(tensor), dtype=tensor.dtype, device=tensor.device)
                leaves[place] = like.requires_grad_(tensor.requires_grad)
            args, kwargs = tree_unflatten(leaves, spec)
            try:
                return measure_work(again.function, args, kwargs, list(params.values()), self._device_kind)
            except Exception as error:
                raise UsageError(
                    f"{call.member or own.name} cannot be computed by itself, as backward does, with nothing but its "
                    f"arguments ({type(error).__name__}: {error}): hand over as arguments what the model sets in its "
                    f"attributes"
                ) from error

    def _measure_real(self, call: UnitCall, params: dict[str, torch.Tensor]) -> Work:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            piece = tensor[: call.chunk_rows] if call.kind == "LOSS" and tensor.dim() else tensor
            return piece.detach().requires_grad_(tensor.requires_grad)

        args, kwargs = tree_map_only(torch.Tensor, own, (call.args, call.kwargs))
        drawing = rng_kept(self._device, generators_in((call.args, call.kwargs)))
        with drawing, nothing_kept(_modules(self._units[call.unit])):
            found = measure_work(call.function, args, kwargs, list(params.values()), self._device_kind)
        for param in params.values():
            param.grad = None
        return found


@contextmanager
def on_fakes(device: torch.device, modules: Iterable[nn.Module]) -> Iterator[FakeTensorMode]:
    """What is called within sees tensors of that device without content, and leaves nothing behind in these modules,
    in random states or in PyTorch's log, which would be nothing to the user: an error is raised."""
    tell_grouped_products()
    was_disabled = _FAKE_LOG.disabled
    _FAKE_LOG.disabled = True
    try:
        with (
            rng_kept(device),
            nothing_kept(modules),
            torch.compiler.set_stance("force_eager"),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            yield mode
    finally:
        _FAKE_LOG.disabled = was_disabled


def _modules(unit: Unit) -> Iterator[nn.Module]:
    return (part for _, module in unit.members for part in module.modules())


def _cut_sizes(call: CallRecord, shape: CallShape) -> dict[int, list[int]]:
    """Of the inputs of a micro-batch, by place."""
    sizes = {place: list(tensor.shape) for place, tensor in call.inputs.items()}
    for place in shape.cut_inputs if shape.chunks > 1 else ():
        sizes[place][0] = min(shape.chunk_rows, sizes[place][0])
    return sizes
