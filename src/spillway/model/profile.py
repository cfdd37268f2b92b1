"""What one forward of a model calls, in which order, and what each call costs.

The forward runs on fake tensors: shapes and dtypes only, no memory, no arithmetic. Where a model looks at values
(`.item()`, `if tensor:`) that is impossible and the caller profiles a real forward instead.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from spillway.model.alike import AlikeCalls, given_by
from spillway.model.layouts import Order, is_plain, order_of
from spillway.model.operators import OperatorTally, storage_of
from spillway.model.units import Unit
from spillway.model.work import Work
from spillway.spec.errors import UsageError
from spillway.spec.model import CallProfile, ModelProfile, OperatorClass, UnitProfile
from spillway.spec.sizes import PAGE, align
from spillway.spec.state import StateFormat
from spillway.store.layout import laid_out_for


@dataclass(frozen=True, slots=True)
class UnitCall:
    """A unit's member was called, by the user's forward or by the loss. `kind` as in CallProfile; `chunk_rows`: of a
    LOSS, the rows of a piece."""

    unit: int
    member: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: str = "FORWARD"
    chunk_rows: int = 0

    def run(self) -> Any:
        """What the function gives."""
        return self.function(*self.args, **self.kwargs)

    def run_in_pieces(self) -> Any:
        """Of a LOSS: the sum over pieces of the rows of its arguments."""
        return sum(self.function(*part, **self.kwargs) for part in self._parts())

    def run_recomputed(self) -> Any:
        """Of a LOSS whose weights are always at hand: the same, each piece computed again in backward."""
        function = partial(self.function, **self.kwargs)
        return sum(checkpoint(function, *part, use_reentrant=False) for part in self._parts())

    def _parts(self) -> Iterator[list[torch.Tensor]]:
        rows, step = self.args[0].shape[0], self.chunk_rows
        return ([arg[start : start + step] for arg in self.args] for start in range(0, max(rows, 1), step))


@dataclass(slots=True)
class CallRecord:
    """One observed call of a unit's member. `inputs` and `outputs` are the tensors among its flattened arguments and
    results, by place, or twins of them without content: the same tensor has the same twin, so that identity tells
    shared inputs apart from those only this call needs."""

    unit: int
    member: str
    kind: str
    inputs: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor]
    flops: float
    saved_bytes: int
    saved_count: int
    operators: tuple[OperatorClass, ...] = ()
    rows: int = 0  # of a LOSS: how many it may be cut into
    chunk_rows: int = 0
    again: UnitCall | None = None  # to call it on other fake tensors
    origins: dict[int, frozenset[int]] = field(default_factory=dict)  # per output: inputs it was computed from
    differentiated: bool = True  # an output needs a gradient
    mixes_rows: bool = False  # an operator of it does
    work: Work | None = None  # measured while it was called, on real tensors
    plain: tuple[Any, ...] = ()  # what it gives besides tensors


@dataclass(frozen=True, slots=True)
class CallShape:
    """How the runtime treats the tensors of one call, by their place among the flattened arguments and results. (Not
    by their number: a real forward may leave out a mask that a profiled one cannot know to be trivial.)"""

    unit: int
    member: str
    kind: str
    chunks: int
    chunk_rows: int  # rows of a micro-batch along dimension 0; 0 where the call is not cut
    cut_inputs: frozenset[int]
    cut_outputs: frozenset[int]
    acts: tuple[int, ...]  # inputs that the activation store keeps for backward
    inputs: frozenset[int]  # all of them
    outputs: frozenset[int]  # likewise
    differentiated: bool = True
    orders: tuple[tuple[int, Order], ...] = ()  # of the dimensions of cut outputs in memory, where they are permuted
    elements: int = 0  # of the inputs together


@dataclass(slots=True)
class Profiler:
    """Collects the calls of one forward. `opened`: puts parameters into a unit for a call, if they are not there,
    and gives their storages, which autograd need not save; `weights`: those that are there all along. `is_fake`:
    tensors have no content, so they may be held. `alike`: of fake tensors, calls that need not be made."""

    opened: Callable[[int], AbstractContextManager[set[int]]]
    weights: set[int] = field(default_factory=set)
    is_fake: bool = False
    alike: AlikeCalls | None = None
    calls: list[CallRecord] = field(default_factory=list)
    _twins: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def call(self, call: UnitCall, work: Work | None = None) -> Any:
        """Run one call and write it down, with what is known of its memory. Raises UsageError for one that changes its
        inputs."""
        if self.alike is None or call.kind != "FORWARD":
            with self.opened(call.unit) as weights:
                return self._make(call, weights | self.weights, work)
        given = call.args, call.kwargs
        key = self.alike.key(call.unit, call.member, call.function, given, self.weights)
        known, inputs = self.alike.known(key), tensors_by_place(given)
        if known is not None:
            result = known.again(inputs)
            again = {"inputs": inputs, "outputs": tensors_by_place(result), "again": call}
            self.calls.append(replace(known.facts, unit=call.unit, member=call.member, **again))
            return result
        before = self.alike.before(call.unit, call.member, given)
        with self.opened(call.unit) as own:
            weights = own | self.weights
            result, made = self._make(call, weights, work), self.calls[-1]
        facts = replace(made, unit=-1, member="", **_APART)
        self.alike.note(key, None if before.is_changed() else given_by(inputs, result, facts, weights))
        return result

    def _make(self, call: UnitCall, weights: set[int], work: Work | None) -> Any:
        inputs = tensors_by_place((call.args, call.kwargs))
        versions = [tensor._version for tensor in inputs.values()]
        saved: dict[Any, int] = {}
        elsewhere = weights | {storage_of(tensor) for tensor in inputs.values()}
        # The graph holds both functions, for good if they hold it by a tensor of the call.
        is_fake, name = self.is_fake, call.member or "a unit"
        held: list[Any] = []  # so that no storage gets the number of one that is gone

        def note(tensor: torch.Tensor) -> torch.Tensor | None:
            storage = tensor.untyped_storage()
            if storage._cdata not in elsewhere:
                saved[storage._cdata] = storage.nbytes()
            if not is_fake:  # its number alone, for the activations of all calls would fill the memory
                held.append(StorageWeakRef(storage))
                return None
            # What an operator made would be held by it, for good.
            held.append(tensor if tensor.is_leaf else tensor.detach())
            return held[-1]

        def saved_again(tensor: torch.Tensor | None) -> torch.Tensor:
            if tensor is None:
                raise UsageError(
                    f"the forward depends on values and {name} asks for gradients within it: such a model cannot be "
                    f"planned"
                )
            return tensor

        tally = OperatorTally({place: tensor for place, tensor in inputs.items() if tensor.layout is torch.strided})
        with torch.autograd.graph.saved_tensors_hooks(note, saved_again), tally:
            result = call.run() if is_fake or call.kind != "LOSS" else call.run_in_pieces()
        held.clear()
        if versions != [tensor._version for tensor in inputs.values()]:
            raise changed_in_place(getattr(call.function, "__qualname__", name))
        refuse_hidden_results(getattr(call.function, "__qualname__", name), tree_leaves(result))
        outputs = tensors_by_place(result)
        first = next(iter(inputs.values()), None)
        rows = first.shape[0] if first is not None and first.dim() else 0
        record = CallRecord(
            call.unit,
            call.member,
            call.kind,
            self._without_content(inputs),
            self._without_content(outputs),
            tally.flops,
            sum(saved.values()),
            len(saved),
            tally.classes(),
            rows,
            call.chunk_rows,
            call if self.is_fake else None,
            {place: tally.sources_of(tensor) for place, tensor in outputs.items()},
            any(output.requires_grad for output in outputs.values()),
            tally.mixes_rows,
            work,
            plain_leaves(result),
        )
        self.calls.append(record)
        return result

    def _without_content(self, tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Tensors that may be held until the forward is over, when all of them would fill the memory."""
        if self.is_fake:
            return tensors
        for tensor in tensors.values():
            if tensor not in self._twins:
                twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                self._twins[tensor] = twin.requires_grad_(tensor.requires_grad)
        return {place: self._twins[tensor] for place, tensor in tensors.items()}


def refuse_hidden_results(name: str, results: Iterable[Any]) -> None:
    """Raise UsageError for a result of a call with tensors that nobody finds: no gradient would come to them."""
    for leaf in results:
        if any(isinstance(value, torch.Tensor) for value in getattr(leaf, "__dict__", {}).values()):
            raise UsageError(
                f"{name} returned a {type(leaf).__name__} that holds tensors: return them by themselves or in a tuple "
                f"or dict, or make its class known with torch.utils._pytree.register_dataclass"
            )


def changed_in_place(name: str) -> UsageError:
    """Of a forward that writes into what it was given."""
    return UsageError(
        f"{name} changes one of its inputs in place, so backward could not compute it again: let it work on a copy"
    )


# What differs between records of alike calls.
_APART: dict[str, Any] = {"inputs": {}, "outputs": {}, "again": None}


def tensors_by_place(tree: Any) -> dict[int, torch.Tensor]:
    """The tensors among its flattened leaves, each by its place there."""
    return {place: leaf for place, leaf in enumerate(tree_flatten(tree)[0]) if isinstance(leaf, torch.Tensor)}


def plain_leaves(tree: Any) -> tuple[Any, ...]:
    """Numbers and texts among its flattened leaves."""
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, (int, float, complex, str)))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def grow_batch(batch: Any) -> Any:
    """The batch with one more row: a second forward with it shows which dimensions of which tensors are the batch's."""
    rows = batch_rows(batch)
    return tree_map_only(
        torch.Tensor,
        lambda tensor: torch.cat([tensor, tensor[:1]]) if tensor.dim() and tensor.shape[0] == rows else tensor,
        batch,
    )


def rows_of(
    batch: tuple[tuple[Any, ...], dict[str, Any]], start: int, stop: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """These rows of the arguments of a call: of tensors, and of lists with an item for each row."""
    rows = batch_rows(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, list) and len(value) == rows:
            return value[start:stop]
        return tree_map_only(
            torch.Tensor,
            lambda tensor: tensor[start:stop] if tensor.dim() and tensor.shape[0] == rows else tensor,
            value,
        )

    args, kwargs = batch
    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def batch_rows(batch: Any) -> int:
    """Rows of the first tensor of a batch; 0 if there is none."""
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return tensors[0].shape[0] if tensors else 0


def shapes_of(
    calls: list[CallRecord], grown: list[CallRecord] | None, rows: int, micro_batch: int | None
) -> tuple[CallShape, ...]:
    """How to run each call. `grown` is the same forward with one more row in the batch; None: not to be cut."""
    uses: dict[int, int] = {}
    for call in calls:
        for tensor_id in {id(tensor) for tensor in call.inputs.values()}:
            uses[tensor_id] = uses.get(tensor_id, 0) + 1
    return tuple(
        replace(
            _shape_of(call, None if grown is None else grown[index], rows, micro_batch, uses),
            differentiated=call.differentiated,
        )
        for index, call in enumerate(calls)
    )


def _shape_of(
    call: CallRecord, grown: CallRecord | None, rows: int, micro_batch: int | None, uses: dict[int, int]
) -> CallShape:
    acts = tuple(
        place
        for place, tensor in call.inputs.items()
        if tensor.requires_grad and uses[id(tensor)] == 1 and tensor.numel()
    )
    none: frozenset[int] = frozenset()
    inputs, outputs = frozenset(call.inputs), frozenset(call.outputs)
    elements = sum(tensor.numel() for tensor in call.inputs.values())
    whole = CallShape(call.unit, call.member, call.kind, 1, 0, none, none, acts, inputs, outputs, elements=elements)
    if call.kind == "LOSS":
        chunks = max(-(-call.rows // call.chunk_rows), 1)
        return replace(whole, chunks=chunks, chunk_rows=call.chunk_rows, cut_inputs=inputs)
    if grown is None or micro_batch is None or micro_batch >= rows or call.mixes_rows:
        return whole
    cut_inputs = _grown_places(call.inputs, grown.inputs)
    cut_outputs = _grown_places(call.outputs, grown.outputs)
    if not cut_inputs or not _is_cut_cleanly(call, grown, cut_inputs, cut_outputs):
        return whole
    permuted = ((place, order_of(call.outputs[place])) for place in sorted(cut_outputs))
    return replace(
        whole,
        chunks=-(-rows // micro_batch),
        chunk_rows=micro_batch,
        cut_inputs=cut_inputs,
        cut_outputs=cut_outputs,
        orders=tuple((place, order) for place, order in permuted if not is_plain(order)),
    )


def _is_cut_cleanly(
    call: CallRecord, grown: CallRecord, cut_inputs: frozenset[int], cut_outputs: frozenset[int]
) -> bool:
    """Whether the outputs of the whole batch are those of its parts one after another. Not so where a tensor grew
    otherwise than by one row (all tokens in one dimension), or where something computed from the rows did not grow
    with them (a loss inside the unit, a mean over the batch, a number)."""
    if call.plain != grown.plain:
        return False
    for tensors, others, cut in ((call.inputs, grown.inputs, cut_inputs), (call.outputs, grown.outputs, cut_outputs)):
        for place, tensor in tensors.items():
            expected = (tensor.shape[0] + 1, *tensor.shape[1:]) if place in cut else tuple(tensor.shape)
            if tuple(others[place].shape) != expected:
                return False
    for place, tensor in call.outputs.items():
        if place not in cut_outputs and (tensor.dim() == 0 or call.origins.get(place, frozenset()) & cut_inputs):
            return False
    return True


def _grown_places(tensors: dict[int, torch.Tensor], grown: dict[int, torch.Tensor]) -> frozenset[int]:
    return frozenset(place for place, tensor in tensors.items() if _grew(tensor, grown[place]))


def _grew(tensor: torch.Tensor, grown: torch.Tensor) -> bool:
    return bool(tensor.dim() and grown.shape[0] == tensor.shape[0] + 1)


def model_profile(
    units: tuple[Unit, ...],
    calls: list[CallRecord],
    shapes: tuple[CallShape, ...],
    works: tuple[Work, ...],
    tokens: int,
    residents: frozenset[int],
) -> ModelProfile:
    """What the planner needs to know. `works`: per call, of one micro-batch. `residents`: units bound all step."""
    act_ids = {id(calls[i].inputs[j]) for i, shape in enumerate(shapes) for j in shape.acts}
    boundary: dict[int, int] = {}
    for call in calls:
        for tensor in (*call.inputs.values(), *call.outputs.values()):
            if id(tensor) not in act_ids:
                boundary[id(tensor)] = tensor_bytes(tensor)
    profiles = tuple(
        CallProfile(
            shape.unit,
            call.flops,
            sum(align(tensor_bytes(call.inputs[index]), PAGE) for index in shape.acts),
            call.saved_bytes,
            shape.kind,
            shape.chunks,
            call.saved_count,
            tuple(operator.cut(shape.chunks) for operator in call.operators),
            work.peak + _whole(call) if work.peak and shape.chunks > 1 else work.peak,
            work.heap,
            call.differentiated,
            _forks(call, shape),
        )
        for call, shape, work in zip(calls, shapes, works, strict=True)
    )
    update_bytes = max(unit.layout.update_bytes for unit in units)
    known = tuple(map(unit_profile, units))
    return ModelProfile(known, profiles, sum(boundary.values()), residents, tokens, update_bytes)


def _forks(call: CallRecord, shape: CallShape) -> bool:
    """Not pieces of a loss, which are there to be few at a time, nor micro-batches that share an input which needs a
    gradient: each would add to it."""
    shared = any(tensor.requires_grad for place, tensor in call.inputs.items() if place not in shape.cut_inputs)
    return shape.chunks > 1 and shape.kind != "LOSS" and not shared


def _whole(call: CallRecord) -> int:
    """What goes in and out of a call that is cut, and its gradients: they are of the whole batch."""
    outputs = sum(tensor_bytes(tensor) for tensor in call.outputs.values())
    return 2 * outputs + sum(tensor_bytes(tensor) for tensor in call.inputs.values() if tensor.requires_grad)


def with_form(profile: ModelProfile, units: tuple[Unit, ...], form: StateFormat) -> ModelProfile:
    """A profile with its units laid out for another optimizer."""
    units = tuple(replace(unit, layout=laid_out_for(unit.layout, form)) for unit in units)
    return replace(
        profile,
        units=tuple(map(unit_profile, units)),
        update_bytes=max(unit.layout.update_bytes for unit in units),
    )


def unit_profile(unit: Unit) -> UnitProfile:
    """Sizes of a unit."""
    layout = unit.layout
    return UnitProfile(
        unit.name,
        sum(place.numel for place in layout.places),
        layout.num_trainable,
        layout.weight_bytes,
        layout.grad_bytes,
        layout.state_bytes,
    )
