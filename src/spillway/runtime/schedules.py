"""A plan for every shape of batch: what a forward on it would call, learnt without computing it."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from spillway.model.alike import AlikeCalls
from spillway.model.binding import bound
from spillway.model.operators import storage_of
from spillway.model.profile import (
    CallRecord,
    CallShape,
    Profiler,
    UnitCall,
    batch_rows,
    grow_batch,
    model_profile,
    shapes_of,
    tensors_by_place,
)
from spillway.model.units import Unit
from spillway.model.work import MeasuredWorks, Work, measure_work
from spillway.runtime.buffers import nothing_kept
from spillway.runtime.calls import own_copy, rng_kept
from spillway.runtime.device import Device
from spillway.runtime.window import leaves
from spillway.spec.errors import UsageError
from spillway.spec.model import ModelProfile
from spillway.spec.plan import Plan

# What a call takes while it computes may be told by one that is so many times as large.
_SLACK = 1.25
# Schedules that are kept, of about a megabyte each: batches may be of any number of lengths.
_REMEMBERED = 128


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan for batches of one shape."""

    plan: Plan
    profile: ModelProfile
    shapes: tuple[CallShape, ...]
    calls_beside: bool  # units are also called without gradients, which the list knows nothing of


@dataclass(slots=True)
class _Observed:
    """The calls of a forward on a batch; and on one with a row more, once that was asked for."""

    calls: list[CallRecord]
    grown: list[CallRecord] | None = None


# Makes the plan for a profile; the second argument tells whether units already rest where an earlier plan put them.
Planner = Callable[[ModelProfile, bool], Plan]


@dataclass(frozen=True, slots=True)
class Look:
    """What a forward learns from the values of its batch, for it cannot look at fake tensors."""

    read: Callable[[tuple[Any, ...], dict[str, Any]], Hashable]  # from a real batch; its schedules are known by it
    told: Callable[[Any], AbstractContextManager[None]]  # a forward on fake tensors within acts on what was read


# Where an operator refuses what it is given, it is told here before it is tried in another way.
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")

# Gets the function that profiles one forward and returns what it gave, trying what it may.
Trial = Callable[[Callable[[], list[CallRecord]]], list[CallRecord]]


class Schedules:
    """Profiles each new shape of batch once, on fake tensors, or on real ones where the forward looks at values."""

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        device: Device,
        placeholders: dict[str, nn.Parameter],
        planner: Planner,
        micro_batch: int | None,
        is_open: Callable[[], bool],
        at_rest: Callable[[], AbstractContextManager[None]],
        on_demand: Callable[[int], AbstractContextManager[tuple[torch.Tensor, dict[str, torch.Tensor]]]],
    ) -> None:
        """`is_open`: whether weights are at rest. `at_rest`: brings them there before any batch is known,
        and binds those outside any unit's forward. `on_demand`: a unit by itself."""
        self.trials: list[Trial] = []
        self.looks: list[Look] = []
        self._model = model
        self._units = units
        self._device = device.torch_device
        self._device_kind = device.kind
        self._placeholders = placeholders
        self._planner = planner
        self._micro_batch = micro_batch
        self._is_open = is_open
        self._at_rest = at_rest
        self._on_demand = on_demand
        self._known: dict[Any, Schedule] = {}
        self._observed: dict[Any, _Observed] = {}
        self._profiler: Profiler | None = None
        self._is_real = False
        self._measured = MeasuredWorks(_SLACK)
        self._calls_beside = False

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """The schedule for batches like this one. Raises UsageError and PlanInfeasible."""
        self._refuse_other_device((args, kwargs))
        signature, seen = self._sign(args, kwargs)
        schedule = self._known.pop(signature, None) or self._make(args, kwargs, seen)
        self._known[signature] = schedule
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]  # the one that was asked for longest ago
        return schedule

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any], micro_batch: int | None) -> ModelProfile:
        """What a step on this batch would be, cut into micro-batches of so many rows, before there are any weights.
        Forwards that were made for other cuts serve again. Raises UsageError."""
        signature, seen = self._sign(args, kwargs)
        rows, found = batch_rows((args, kwargs)), self._observed.get(signature)
        is_cut = micro_batch is not None and micro_batch < rows
        try:
            if found is None:
                found = _Observed(self._try(lambda: self._profile_fake(args, kwargs, seen)))
                self._observed[signature] = found
            if is_cut and found.grown is None:
                found.grown = self._profile_grown(args, kwargs, seen)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the forward of {type(self._model).__name__} depends on the values of its tensors ({error}), so what "
                f"it takes shows only when it is trained: prepare the model, whose first forward plans"
            ) from error
        shapes = shapes_of(found.calls, found.grown if is_cut else None, rows, micro_batch)
        return self._profile_of(args, kwargs, found.calls, shapes, MeasuredWorks(1.0))

    def _sign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Hashable, ...]]:
        """What tells batches apart, and what is seen of its values."""
        seen = tuple(look.read(args, kwargs) for look in self.looks)
        return (_signature((args, kwargs)), seen, self._model.training, self._autocast()), seen

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: tuple[Hashable, ...]) -> Schedule:
        self._calls_beside = False
        calls, shapes = self._profile(args, kwargs, seen) if _tensors((args, kwargs)) else ([], ())
        profile = self._profile_of(args, kwargs, calls, shapes, self._measured)
        return Schedule(self._planner(profile, self._is_open()), profile, shapes, self._calls_beside)

    def _profile_of(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        calls: list[CallRecord],
        shapes: tuple[CallShape, ...],
        measured: MeasuredWorks,
    ) -> ModelProfile:
        tokens = max((leaf.numel() for leaf in _tensors((args, kwargs)) if not leaf.is_floating_point()), default=0)
        return model_profile(self._units, calls, shapes, self._works(calls, shapes, measured), tokens)

    def _autocast(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @property
    def is_profiling(self) -> bool:
        """Whether the forward under way is one of ours."""
        return self._profiler is not None

    def profile_call(self, call: UnitCall) -> Any:
        """A unit's member was called while profiling."""
        if self._profiler is None:
            raise AssertionError("no forward is being profiled")
        is_beside = not torch.is_grad_enabled()
        self._calls_beside |= is_beside
        if not self._is_real:
            if not is_beside:
                return self._profiler.call(call)
            with self._with_fakes(call.unit):
                return call.run()
        with self._on_demand(call.unit) as (slot, _):
            result = call.run() if is_beside else self._profile_real_call(self._profiler, call, slot)
            return tree_map_only(torch.Tensor, lambda output: own_copy(output, slot), result)

    def _profile_real_call(self, profiler: Profiler, call: UnitCall, slot: torch.Tensor) -> Any:
        unit = self._units[call.unit]
        params = leaves(unit, slot)
        with bound(unit, params, self._placeholders):
            profiler.weights.add(storage_of(slot))
            return profiler.call(call, self._real_work(call, params))

    def _profile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: tuple[Hashable, ...]
    ) -> tuple[list[CallRecord], tuple[CallShape, ...]]:
        rows = batch_rows((args, kwargs))
        try:
            calls = self._try(lambda: self._profile_fake(args, kwargs, seen))
            grown = None
            if self._micro_batch is not None and self._micro_batch < rows:
                grown = self._profile_grown(args, kwargs, seen)
        except UsageError:
            raise
        except Exception as error:
            if self._micro_batch is not None and self._micro_batch < rows:
                raise UsageError(
                    f"the forward of {type(self._model).__name__} depends on the values of its tensors ({error}), so "
                    f"it cannot be cut into micro-batches: leave micro_batch out"
                ) from error
            calls, grown = self._try(lambda: self._profile_real(args, kwargs)), None
        return calls, shapes_of(calls, grown, rows, self._micro_batch)

    def _refuse_other_device(self, batch: Any) -> None:
        """Raise UsageError for a batch that is not where it is computed. (A number in a tensor may be.)"""
        for tensor in _tensors(batch):
            if tensor.device.type != self._device.type and tensor.dim():
                raise UsageError(
                    f"a tensor of the batch (shape {tuple(tensor.shape)}) is on {tensor.device} and the model computes "
                    f"on {self._device}: move the batch there first"
                )

    def _try(self, profile: Callable[[], list[CallRecord]]) -> list[CallRecord]:
        for attempt in self.trials:
            profile = partial(attempt, profile)
        return profile()

    def _profile_grown(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: tuple[Hashable, ...]
    ) -> list[CallRecord]:
        """With one more row."""
        args, kwargs = grow_batch((args, kwargs))
        return self._profile_fake(args, kwargs, seen)

    def _profile_fake(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: tuple[Hashable, ...]
    ) -> list[CallRecord]:
        members = {(index, path): part for index, unit in enumerate(self._units) for path, part in unit.members}
        alike = AlikeCalls(members)
        try:
            calls = self._forward_fake(args, kwargs, seen, alike)
        except Exception:
            if not alike.is_used:
                raise
        else:
            if not alike.is_contradicted:
                return calls
        return self._forward_fake(args, kwargs, seen, None)

    def _forward_fake(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seen: tuple[Hashable, ...], alike: AlikeCalls | None
    ) -> list[CallRecord]:
        with (
            rng_kept(self._device),
            nothing_kept(self._model.modules()),
            _quietly(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            ExitStack() as stack,
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            for look, value in zip(self.looks, seen, strict=True):
                stack.enter_context(look.told(value))
            # Those outside any unit's forward are there all along, the others while their unit is called.
            resident = [index for index, unit in enumerate(self._units) if not unit.members]
            weights = set[int]().union(*(stack.enter_context(self._with_fakes(index)) for index in resident))
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            return self._record(args, kwargs, Profiler(self._with_fakes, weights, True, alike), is_real=False)

    @contextmanager
    def _with_fakes(self, index: int) -> Iterator[set[int]]:
        """Fake parameters in a unit; gives their storages."""
        unit = self._units[index]
        fakes = self._fakes(unit)
        with bound(unit, fakes, self._placeholders):
            yield {storage_of(fake) for fake in fakes.values()}

    def _fakes(self, unit: Unit) -> dict[str, nn.Parameter]:
        return {
            place.name: nn.Parameter(torch.empty(place.shape, dtype=place.dtype, device=self._device), place.trainable)
            for place in unit.layout.places
        }

    def _works(
        self, calls: list[CallRecord], shapes: tuple[CallShape, ...], measured: MeasuredWorks
    ) -> tuple[Work, ...]:
        """What a micro-batch of each call takes while it computes."""
        works = []
        for call, shape in zip(calls, shapes, strict=True):
            kind = self._kind(call.unit, call.kind, call.inputs)
            sizes = tuple(tuple(size) for size in _cut_sizes(call, shape).values())
            measure = partial(self._work, call, shape)
            works.append(measured.of(kind, sizes, measure) if call.work is None else call.work)
        return tuple(works)

    def _kind(self, unit: int, kind: str, inputs: dict[int, torch.Tensor]) -> Hashable:
        """Equal for calls that take as much while they compute if their inputs are as large."""
        params = tuple((place.shape, place.dtype, place.trainable) for place in self._units[unit].layout.places)
        given = ((place, tensor.dim(), tensor.dtype, tensor.requires_grad) for place, tensor in inputs.items())
        return params, kind, tuple(given)

    def _real_work(self, call: UnitCall, params: dict[str, torch.Tensor]) -> Work:
        """As `_work`, of a call on real data, which is computed forward and backward by itself."""
        inputs = tensors_by_place((call.args, call.kwargs))
        kind = self._kind(call.unit, call.kind, inputs), call.chunk_rows
        sizes = tuple(tuple(tensor.shape) for tensor in inputs.values())
        return self._measured.of(kind, sizes, lambda: self._measure_real(call, params))

    def _measure_real(self, call: UnitCall, params: dict[str, torch.Tensor]) -> Work:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            piece = tensor[: call.chunk_rows] if call.kind == "LOSS" and tensor.dim() else tensor
            return piece.detach().requires_grad_(tensor.requires_grad)

        args, kwargs = tree_map_only(torch.Tensor, own, (call.args, call.kwargs))
        members = [part for _, module in self._units[call.unit].members for part in module.modules()]
        with rng_kept(self._device), nothing_kept(members):
            found = measure_work(call.function, args, kwargs, list(params.values()), self._device_kind)
        for param in params.values():
            param.grad = None
        return found

    def _work(self, call: CallRecord, shape: CallShape) -> Work:
        if call.again is None:
            raise AssertionError("a call on real data was measured when it was made")
        again, own = call.again, self._units[call.unit]
        with (
            rng_kept(self._device),
            nothing_kept(part for _, module in own.members for part in module.modules()),
            _quietly(),
            FakeTensorMode(allow_non_fake_inputs=True),
            ExitStack() as stack,
            torch.compiler.set_stance("force_eager"),
        ):
            params = self._fakes(own)
            stack.enter_context(bound(own, params, self._placeholders))
            for unit in self._units:
                if not unit.members and unit is not own:  # its parameters are there for every call
                    stack.enter_context(bound(unit, self._fakes(unit), self._placeholders))
            leaves, spec = tree_flatten((again.args, again.kwargs))
            for place, size in _cut_sizes(call, shape).items():
                tensor = call.inputs[place]
                leaves[place] = torch.empty(size, dtype=tensor.dtype, device=tensor.device).requires_grad_(
                    tensor.requires_grad
                )
            args, kwargs = tree_unflatten(leaves, spec)
            return measure_work(again.function, args, kwargs, list(params.values()), self._device_kind)

    def _profile_real(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[CallRecord]:
        """A forward on real data, one unit at a time, for models whose forward looks at values."""
        with (
            self._at_rest(),
            rng_kept(self._device),
            nothing_kept(self._model.modules()),
            torch.compiler.set_stance("force_eager"),
        ):
            return self._record(args, kwargs, Profiler(_opened_by_others), is_real=True)

    def _record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], profiler: Profiler, is_real: bool
    ) -> list[CallRecord]:
        self._profiler, self._is_real = profiler, is_real
        try:
            self._model(*args, **kwargs)
        finally:
            self._profiler, self._is_real = None, False
        return profiler.calls


@contextmanager
def _quietly() -> Iterator[None]:
    """What PyTorch logs of a forward on tensors without content is nothing to the user: an error of it is raised."""
    before = _FAKE_LOG.disabled
    _FAKE_LOG.disabled = True
    try:
        yield
    finally:
        _FAKE_LOG.disabled = before


def _cut_sizes(call: CallRecord, shape: CallShape) -> dict[int, list[int]]:
    """Of the inputs of a micro-batch, by place."""
    sizes = {place: list(tensor.shape) for place, tensor in call.inputs.items()}
    for place in shape.cut_inputs if shape.chunks > 1 else ():
        sizes[place][0] = min(shape.chunk_rows, sizes[place][0])
    return sizes


def _opened_by_others(unit: int) -> AbstractContextManager[set[int]]:
    return nullcontext(set())


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def _signature(batch: Any) -> Any:
    leaves, spec = tree_flatten(batch)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
