"""What a forward on a batch calls, learnt without computing it: on fake tensors, or on real ones where it looks at
values."""

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from spillway.model.alike import AlikeCalls
from spillway.model.binding import bound
from spillway.model.operators import storage_of
from spillway.model.placeholder import ReadElsewhere
from spillway.model.profile import (
    CallRecord,
    CallShape,
    Profiler,
    UnitCall,
    batch_rows,
    grow_batch,
    model_profile,
    rows_of,
)
from spillway.model.units import Unit
from spillway.runtime.buffers import nothing_kept
from spillway.runtime.calls import generators_in, own_copy, rng_kept
from spillway.runtime.device import Device
from spillway.runtime.window import fake_leaves, leaves
from spillway.runtime.works import Works, on_fakes
from spillway.spec.errors import UsageError, required
from spillway.spec.model import ModelProfile


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model's forward is called with, and what was read of its values. Batches of one `key` have the same
    calls."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seen: tuple[Hashable, ...]
    key: Hashable

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those among its leaves."""
        return _tensors((self.args, self.kwargs))

    @property
    def rows(self) -> int:
        """Of its first tensor."""
        return batch_rows((self.args, self.kwargs))

    def part(self, start: int, stop: int) -> "Batch":
        """These rows of it."""
        args, kwargs = rows_of((self.args, self.kwargs), start, stop)
        return replace(self, args=args, kwargs=kwargs)

    def grown(self) -> "Batch":
        """With one more row."""
        args, kwargs = grow_batch((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Look:
    """What a forward learns from the values of its batch, for it cannot look at fake tensors."""

    read: Callable[[tuple[Any, ...], dict[str, Any]], Hashable]  # from a real batch; its schedules are known by it
    told: Callable[[Any], AbstractContextManager[None]]  # a forward on fake tensors within acts on what was read


# Where an object that says nothing of its content lies: another one in every batch, perhaps.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_SMALL_TABLE = 1 << 20

# Gets the function that profiles one forward and returns what it gave, trying what it may.
Trial = Callable[[Callable[[], list[CallRecord]]], list[CallRecord]]


class Forwards:
    """Runs the model's forward to see its calls; what a call of a unit's member does meanwhile is decided here."""

    def __init__(
        self,
        model: nn.Module,
        units: tuple[Unit, ...],
        device: Device,
        placeholders: dict[str, nn.Parameter],
        at_rest: Callable[[], AbstractContextManager[None]],
        on_demand: Callable[[int], AbstractContextManager[tuple[torch.Tensor, dict[str, torch.Tensor]]]],
        is_open: Callable[[], bool],
    ) -> None:
        """`at_rest`: brings weights there before any batch is known, and binds those of residents. `on_demand`: a unit
        by itself. `is_open`: whether weights are at rest."""
        self.trials: list[Trial] = []
        self.looks: list[Look] = []
        self.on_begin: list[Callable[[], None]] = []  # of a forward that is looked at
        self.calls_beside = False  # of the last forward: units were called without gradients, too
        # Units whose parameters are used outside of their calls as well, or have none: they are bound all through.
        self.residents = frozenset(index for index, unit in enumerate(units) if not unit.members)
        self._model = model
        self._units = units
        self._device = device.torch_device
        self._placeholders = placeholders
        self._at_rest = at_rest
        self._on_demand = on_demand
        self._is_open = is_open
        self._works = Works(units, device, placeholders)
        self._profiler: Profiler | None = None
        self._is_real = False
        self._alike_kinds: set[Hashable] = set()  # of which later forwards make one call alone

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The batch of a call of the model. Raises UsageError for one that is not where it is computed."""
        for tensor in _tensors((args, kwargs)):
            if tensor.device != self._device and tensor.dim():  # a number in a tensor may be elsewhere
                raise UsageError(
                    f"a tensor of the batch (shape {tuple(tensor.shape)}) is on {tensor.device} and the model computes "
                    f"on {self._device}: move the batch there first"
                )
        seen = self._seen(args, kwargs)
        training = tuple(module.training for module in self._model.modules())
        return Batch(args, kwargs, seen, (_signature((args, kwargs)), seen, training, self._autocast()))

    def fake(self, batch: Batch) -> list[CallRecord]:
        """The calls of a forward on fake tensors, with what the batch allows of what models may try. Raises what
        the forward does where it looks at values."""
        return self._try(lambda: self._fake(batch))

    def find_residents(self, batch: Batch) -> None:
        """Learn of them from a batch, as far as that is possible without computing."""
        try:
            self._fake(batch)
        except Exception:  # it looks at values, or raises this when it is computed, too
            self._suppose_residents()

    def grown(self, batch: Batch) -> list[CallRecord]:
        """Those on a row more, with what was found to be allowed."""
        return self._fake(batch.grown())

    def real(self, batch: Batch) -> list[CallRecord]:
        """Those on real data, one unit at a time, for models whose forward looks at values."""
        self._suppose_residents()
        return self._try(lambda: self._real(batch))

    def parts(self, batch: Batch, count: int) -> tuple[Batch, Batch]:
        """So many rows of a batch, and a row more; of whose values the same is read as of all, if there are such (the
        padding of one row makes a mask for all)."""
        for start in range(batch.rows - count):
            found = batch.part(start, start + count), batch.part(start, start + count + 1)
            if all(self._seen(part.args, part.kwargs) == batch.seen for part in found):
                return found
        return batch.part(0, count), batch.part(0, count + 1)

    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
        return tuple(look.read(args, kwargs) for look in self.looks)

    def profile(
        self, batch: Batch, calls: list[CallRecord], shapes: tuple[CallShape, ...], slack: float = 1.0
    ) -> ModelProfile:
        """What the planner needs to know of these calls. `slack`: see MeasuredWorks."""
        works = tuple(
            self._works.of(call, shape, slack, self.residents) for call, shape in zip(calls, shapes, strict=True)
        )
        tokens = max((leaf.numel() for leaf in batch.tensors if not leaf.is_floating_point()), default=0)
        return model_profile(self._units, calls, shapes, works, tokens, self.residents)

    @property
    def is_profiling(self) -> bool:
        """Whether the forward under way is one of ours."""
        return self._profiler is not None

    def call(self, call: UnitCall) -> Any:
        """A unit's member was called while profiling."""
        profiler = required(self._profiler, "no forward is being profiled")
        is_beside = not torch.is_grad_enabled()
        self.calls_beside |= is_beside
        if not self._is_real:
            if not is_beside:
                return profiler.call(call)
            with self._with_fakes(call.unit):
                return call.run()
        with self._on_demand(call.unit) as (slot, _):
            result = call.run() if is_beside else self._call_real(profiler, call, slot)
            return tree_map_only(torch.Tensor, lambda output: own_copy(output, [slot]), result)

    def _call_real(self, profiler: Profiler, call: UnitCall, slot: torch.Tensor) -> Any:
        unit = self._units[call.unit]
        params = leaves(unit, slot)
        with bound(unit, params, self._placeholders):
            profiler.weights.add(storage_of(slot))
            work, version = self._works.of_real(call, params), slot._version
            result = profiler.call(call, work)
        if slot._version != version:
            raise _written(unit.name)
        return result

    def _autocast(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _try(self, profile: Callable[[], list[CallRecord]]) -> list[CallRecord]:
        for attempt in self.trials:
            profile = partial(attempt, profile)
        return profile()

    def _fake(self, batch: Batch) -> list[CallRecord]:
        while True:
            try:
                return self._fake_with_residents(batch)
            except ReadElsewhere as error:
                owner = next(index for index, unit in enumerate(self._units) if _has(unit, error.name))
                if owner in self.residents or self._is_open():
                    raise
                self.residents |= {owner}

    def _fake_with_residents(self, batch: Batch) -> list[CallRecord]:
        members = {(index, path): part for index, unit in enumerate(self._units) for path, part in unit.members}
        alike = AlikeCalls(members, self._alike_kinds)
        try:
            calls = self._run_fake(batch, alike)
        except Exception:
            if not alike.is_used:
                raise
        else:
            if not alike.is_contradicted:
                self._alike_kinds |= alike.found_alike()
                return calls
        self._alike_kinds.clear()
        return self._run_fake(batch, None)

    def _run_fake(self, batch: Batch, alike: AlikeCalls | None) -> list[CallRecord]:
        with (
            on_fakes(self._device, self._model.modules()) as mode,
            ExitStack() as stack,
            torch.enable_grad(),
        ):
            for look, value in zip(self.looks, batch.seen, strict=True):
                stack.enter_context(look.told(value))
            fakes = (stack.enter_context(self._with_fakes(index)) for index in self.residents)
            weights = set[int]().union(*fakes)
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (batch.args, batch.kwargs))
            return self._record(args, kwargs, Profiler(self._with_fakes, weights, True, alike), is_real=False)

    def _real(self, batch: Batch) -> list[CallRecord]:
        with (
            self._at_rest(),
            rng_kept(self._device, generators_in((batch.args, batch.kwargs))),
            nothing_kept(self._model.modules()),
            torch.compiler.set_stance("force_eager"),
        ):
            return self._record(batch.args, batch.kwargs, Profiler(_opened_by_others), is_real=True)

    def _record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], profiler: Profiler, is_real: bool
    ) -> list[CallRecord]:
        self._profiler, self._is_real, self.calls_beside = profiler, is_real, False
        for begin in self.on_begin:
            begin()
        try:
            self._model(*args, **kwargs)
        finally:
            self._profiler, self._is_real = None, False
        return profiler.calls

    def _suppose_residents(self) -> None:
        """Where residents cannot be told before weights come to rest, small tables are taken for such: many a model
        reads them by their weights."""
        if not self._is_open():
            self.residents |= {index for index, unit in enumerate(self._units) if _is_small_table(unit)}

    @contextmanager
    def _with_fakes(self, index: int) -> Iterator[set[int]]:
        """Fake parameters in a unit; gives their storages."""
        unit = self._units[index]
        fakes = fake_leaves(unit, self._device)
        with bound(unit, fakes, self._placeholders):
            yield {storage_of(fake) for fake in fakes.values()}
        for name, fake in fakes.items():
            if fake._version:
                raise _written(name)


def _written(name: str) -> UsageError:
    """Of parameters that their own forward changes."""
    return UsageError(
        f"{name} is changed by its own forward (max_norm of an embedding, a clamp?), and a step writes back what the "
        f"optimizer makes of it alone: change what is read of it instead"
    )


def _is_small_table(unit: Unit) -> bool:
    is_table = all(isinstance(module, nn.Embedding) for _, module in unit.members)
    return is_table and unit.layout.weight_bytes <= _SMALL_TABLE


def _has(unit: Unit, name: str) -> bool:
    return any(place.name == name for place in unit.layout.places)


def _opened_by_others(unit: int) -> AbstractContextManager[set[int]]:
    return nullcontext(set())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _signature(batch: Any) -> Hashable:
    leaves, spec = tree_flatten(batch)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else _ADDRESS.sub("", repr(leaf))
        for leaf in leaves
    )
