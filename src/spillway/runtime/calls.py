"""One call of a unit, flattened: cut into micro-batches, run, put together again, and differentiated."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from spillway.model.layouts import Order
from spillway.model.profile import CallShape, changed_in_place, plain_leaves, refuse_hidden_results
from spillway.runtime.device import Device
from spillway.runtime.graph import Graph, Like, Root, bypass
from spillway.runtime.held import address_of
from spillway.runtime.tape import Tape
from spillway.spec.errors import UsageError, invariant


@dataclass(frozen=True, slots=True)
class FlatCall:
    """A function and its arguments with the tensors taken out; `holes` are their places among the leaves."""

    function: Callable[..., Any]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    holes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the function, for messages."""
        return getattr(self.function, "__qualname__", "a unit")

    def run(self, tensors: list[torch.Tensor]) -> tuple[list[Any], TreeSpec]:
        """Call the function with these tensors; its result flattened."""
        leaves = list(self.leaves)
        for hole, tensor in zip(self.holes, tensors, strict=True):
            leaves[hole] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        found, spec = tree_flatten(self.function(*args, **kwargs))
        _refuse_written(self, leaves, (args, kwargs))
        refuse_hidden_results(self.name, found)
        return found, spec


def flatten_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[FlatCall, list[torch.Tensor]]:
    """The call, and its tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    holes = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[hole] for hole in holes]
    for hole in holes:
        leaves[hole] = None
    call = FlatCall(function, spec, tuple(leaves), holes)
    _refuse_hidden(call)
    _refuse_fakes(call, tensors)
    return call, tensors


def _refuse_fakes(call: FlatCall, tensors: list[Any]) -> None:
    """Raise UsageError for a tensor without content: something kept it while the step was planned."""
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise UsageError(
            f"{call.name} works with a placeholder (fake) tensor that was made while its step was planned, and "
            f"kept outside of the model's modules (by functools.cache?): make it in __init__, or by a forward before "
            f"prepare"
        )


def _refuse_hidden(call: FlatCall) -> None:
    """Raise UsageError for an argument with tensors that nobody finds: their gradients would go past the unit."""
    for leaf in call.leaves:
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in _held_by(leaf)):
            raise UsageError(
                f"{call.name} was given a {type(leaf).__name__} that holds tensors with gradients: hand them over by "
                f"themselves or in a tuple or dict, or make its class known with torch.utils._pytree.register_dataclass"
            )


def _held_by(leaf: Any) -> list[Any]:
    """What an object has in its attributes, and in itself where it is of a class derived from a collection's."""
    slots = {name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())}
    found = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in slots)]
    if isinstance(leaf, dict):
        found += leaf.values()
    elif isinstance(leaf, (list, tuple, set, frozenset)):
        found += leaf
    return found


def _refuse_written(call: FlatCall, before: list[Any], arguments: Any) -> None:
    """Raise UsageError where the function changed what is in its arguments: they are made anew for each computation,
    and nobody else would see it."""
    after = tree_leaves(arguments)
    if len(after) != len(before) or not all(map(is_, after, before)):
        raise UsageError(
            f"{call.name} writes into a list or dict that it was given in two places or that holds others, which would "
            f"be lost, for it is computed more than once: return what it writes instead"
        )


def _refuse_unknown(call: FlatCall, shape: CallShape) -> None:
    """Raise UsageError for a call that is cut and was given a tensor that it was not given when it was profiled."""
    if shape.chunks > 1 and not shape.inputs.issuperset(call.holes):
        raise UsageError(
            f"{call.name} was given a tensor that the rows from which its micro-batches were planned did not need, for "
            f"it depends on their values: leave micro_batch out, or make that tensor for every batch"
        )


def fitted(call: FlatCall, shape: CallShape, tensors: list[torch.Tensor]) -> CallShape:
    """With as many micro-batches as these tensors have rows for, which may be others than those of the forward that was
    profiled: what a model makes of a batch may depend on more than its shape. Raises UsageError where tensors that are
    cut alike differ in rows."""
    cut = (tensor for hole, tensor in zip(call.holes, tensors, strict=True) if hole in shape.cut_inputs)
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in cut}
    if len(rows) > 1:
        raise UsageError(
            f"{call.name} was given tensors of {' and '.join(map(str, sorted(rows)))} rows, and of as many each when "
            f"its micro-batches were planned: leave micro_batch out"
        )
    chunks = max(-(-rows.pop() // shape.chunk_rows), 1) if rows else shape.chunks
    return shape if chunks == shape.chunks else replace(shape, chunks=chunks)


@dataclass(slots=True)
class Replay:
    """What backward needs to run the forward again bit for bit: generator states and autocast."""

    rng: list["RngState"]
    autocast: Callable[[], AbstractContextManager[Any]]


def autocast_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast setting in force, to be entered again later."""
    dtype, enabled = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
    return lambda: torch.autocast(device.type, dtype, enabled)


@dataclass(frozen=True, slots=True)
class RngState:
    """Of the generators a unit may draw from: PyTorch's for the CPU and, on a GPU, its own, Python's, and NumPy's where
    that is in use. (Those that modules hold are theirs: see BufferGuard.)"""

    cpu: torch.Tensor
    device: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: Any
    given: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()


def rng_state(device: torch.device, given: Iterable[torch.Generator] = ()) -> RngState:
    """The present state. `given`: generators that a call has among its arguments."""
    on_device = None if device.type == "cpu" else torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy.random")
    return RngState(
        torch.get_rng_state(),
        on_device,
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),
        tuple((generator, generator.get_state()) for generator in given),
    )


def set_rng_state(device: torch.device, state: RngState) -> None:
    """Go on with the random numbers that `rng_state` has noted."""
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device, device)
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy.random"].set_state(state.numpy)
    for generator, known in state.given:
        generator.set_state(known)


def generators_in(tree: Any) -> list[torch.Generator]:
    """Those among its leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Generator)]


@contextmanager
def rng_kept(device: torch.device, given: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put the generators back afterwards, whatever happens."""
    state = rng_state(device, given)
    try:
        yield
    finally:
        set_rng_state(device, state)


def pieces(call: FlatCall, shape: CallShape, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors of each micro-batch: cut ones narrowed, the others whole."""
    for index in range(shape.chunks):
        yield [
            _rows(tensor, shape, index) if hole in shape.cut_inputs else tensor
            for hole, tensor in zip(call.holes, tensors, strict=True)
        ]


def _rows(tensor: torch.Tensor, shape: CallShape, index: int) -> torch.Tensor:
    if shape.chunks == 1:
        return tensor
    start = index * shape.chunk_rows
    return tensor.narrow(0, start, min(shape.chunk_rows, tensor.shape[0] - start))


def _drop(tensor: torch.Tensor) -> None:
    """Autograd saves nothing in the first forward: backward computes it again."""


def _refuse(name: str) -> Callable[[object], torch.Tensor]:
    """For what was dropped, and gradients that nobody waits for."""

    def refuse(_: object) -> torch.Tensor:
        raise bypass(name)

    return refuse


def run_forward(
    call: FlatCall,
    shape: CallShape,
    tensors: list[torch.Tensor],
    device: Device,
    streams: int,
    slot: torch.Tensor,
    weights: Iterable[torch.Tensor],
    graph: Graph | None,
    tape: Tape | None,
) -> tuple[list[Any], TreeSpec, Replay]:
    """The call's result, flattened and detached, with gradients enabled inside so that the same kernels run as in
    backward (attention picks its own by whether a gradient is needed), and nothing kept but what `graph` or `tape`
    takes. `streams`: how many micro-batches may run beside each other.
    `slot`: where the unit's parameters lie; what is a view of it is copied. `weights`: these parameters.

    Raises UsageError where the unit changes an input in place: it could not be computed again.
    """
    _refuse_unknown(call, shape)
    rng, parts = [], []
    refuse = _refuse(call.name)
    pack, unpack = (_drop, refuse) if graph is None else (graph.pack, graph.unpack)
    refuse_bypass = refuse if graph is None else graph.refuse_bypass
    for weight in weights:
        if weight.requires_grad:
            weight.register_hook(refuse_bypass)
    versions = [tensor._version for tensor in tensors]
    spec: TreeSpec | None = None
    with device.fork(streams) as beside:
        for index, piece in enumerate(pieces(call, shape, tensors)):
            rng.append(rng_state(device.torch_device, generators_in(call.leaves)))
            inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in piece]
            for tensor in inputs:
                if tensor.requires_grad:
                    tensor.register_hook(refuse_bypass)
            taping = nullcontext() if tape is None else tape.record()
            saving = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            with beside(index), torch.enable_grad(), saving, taping:
                outputs, spec = call.run(inputs)
                _refuse_fakes(call, outputs)
                if graph is not None:
                    graph.note(inputs, _own(outputs, inputs))
                if tape is not None:
                    tape.note(_own(outputs, inputs))
                parts.append([_settled(output, inputs, slot) for output in outputs])
            del inputs, outputs
    if versions != [tensor._version for tensor in tensors]:
        raise changed_in_place(call.name)
    invariant(spec is not None, "a call has at least one micro-batch")
    if streams > 1:
        device.take_over(output for part in parts for output in part if isinstance(output, torch.Tensor))
    whole = parts[0] if shape.chunks == 1 else _put_together(call, parts, shape)
    return whole, spec, Replay(rng, autocast_of(device.torch_device))


@dataclass(frozen=True, slots=True)
class PassedThrough:
    """An output that is one of the inputs, unchanged: its gradient need not pass the unit."""

    index: int


def _settled(output: Any, inputs: list[torch.Tensor], slot: torch.Tensor) -> Any:
    for index, tensor in enumerate(inputs):
        if output is tensor:
            return PassedThrough(index)
    return own_copy(output.detach(), [slot]) if isinstance(output, torch.Tensor) else output


def own_copy(output: torch.Tensor, passing: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that stays as it is when this memory serves another unit."""
    shares = address_of(output) in map(address_of, passing)
    return output.clone() if shares and output.numel() else output


def _put_together(call: FlatCall, parts: list[list[Any]], shape: CallShape) -> list[Any]:
    _refuse_uneven(call, parts, shape)
    whole = []
    for place, column in enumerate(zip(*parts, strict=True)):
        first = column[0]
        is_tensor = isinstance(first, torch.Tensor)
        if is_tensor and shape.kind == "LOSS":
            total = column[0]
            for part in column[1:]:
                total = total + part
            whole.append(total)
        elif is_tensor and place in shape.cut_outputs:
            whole.append(_joined(column, dict(shape.orders).get(place)))
        else:
            whole.append(first)
    return whole


def _refuse_uneven(call: FlatCall, parts: list[list[Any]], shape: CallShape) -> None:
    """Raise UsageError for results of micro-batches of which nobody knows how to make that of all rows."""

    def places_of_tensors(part: list[Any]) -> set[int]:
        return {place for place, leaf in enumerate(part) if isinstance(leaf, (torch.Tensor, PassedThrough))}

    are_unlike = any(plain_leaves(part) != plain_leaves(parts[0]) for part in parts)
    if are_unlike or any(places_of_tensors(part) != shape.outputs for part in parts):
        raise UsageError(
            f"{call.name} gives something else for a few rows than it did when its micro-batches were planned, or a "
            f"number that depends on the rows: leave micro_batch out"
        )


def _joined(parts: Sequence[torch.Tensor], order: Order | None) -> torch.Tensor:
    """The rows of all parts, in memory as the whole call would have laid them."""
    if order is None:
        return torch.cat(tuple(parts))
    size = (sum(len(part) for part in parts), *parts[0].shape[1:])
    whole = torch.empty_permuted(size, order, dtype=parts[0].dtype, device=parts[0].device)
    return torch.cat(tuple(parts), out=whole)


def run_backward(
    call: FlatCall,
    shape: CallShape,
    tensors: list[torch.Tensor],
    needs_grad: list[bool],
    grads: list[torch.Tensor | None],
    replay: Replay,
    tape: Tape | None,
    device: Device,
    streams: int,
) -> list[torch.Tensor | None]:
    """Recompute each micro-batch, but for what is on the tape, and differentiate it. Parameter gradients are summed
    where the bound leaves point; returned are the gradients of the tensors. `grads`: one per tensor output that is no
    input, in flattened order."""
    likes = [Like.of(tensor, need) for tensor, need in zip(tensors, needs_grad, strict=True)]
    found = InputGradients(call, shape, likes)
    with rng_kept(device.torch_device, generators_in(call.leaves)), device.fork(streams) as beside:
        for index, piece in enumerate(pieces(call, shape, tensors)):
            set_rng_state(device.torch_device, replay.rng[index])
            inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(piece, needs_grad, strict=True)]
            with beside(index), torch.enable_grad():
                with replay.autocast(), nullcontext() if tape is None else tape.replay(index):
                    outputs, _ = call.run(inputs)
                # As plain PyTorch does, outside of autocast: parts of a block that are kept out of it have products of
                # float32 in backward, too.
                _differentiate([Root.of(out) for out in _own(outputs, inputs)], grads, shape, index)
                found.take(inputs, index)
            del inputs, outputs
    return found.all()


def run_kept_backward(
    call: FlatCall,
    shape: CallShape,
    grads: list[torch.Tensor | None],
    graph: Graph,
    device: Device,
    streams: int,
) -> list[torch.Tensor | None]:
    """As `run_backward`, with what the forward kept; `graph` is back."""
    found = InputGradients(call, shape, graph.likes)
    with device.fork(streams) as beside:
        for index in range(shape.chunks):
            inputs, roots = graph.take(index)
            with beside(index):
                _differentiate(roots, grads, shape, index)
                found.take(inputs, index)
            del inputs, roots
    return found.all()


class InputGradients:
    """Gradients of a call's inputs, from those of its micro-batches. These may be computed beside each other, so memory
    that several of them write to is taken before."""

    def __init__(self, call: FlatCall, shape: CallShape, inputs: list[Like]) -> None:
        self._shape = shape
        self._found: list[torch.Tensor | None] = [None] * len(inputs)
        self._whole: dict[int, torch.Tensor] = {}
        self._missing: dict[int, set[int]] = {}  # micro-batches that gave no part of a whole
        if shape.chunks > 1:
            for place, (hole, like) in enumerate(zip(call.holes, inputs, strict=True)):
                if hole in shape.cut_inputs and like.needed:
                    self._whole[place] = like.empty()
                    self._missing[place] = set(range(shape.chunks))

    def take(self, inputs: list[torch.Tensor], index: int) -> None:
        """What a micro-batch found."""
        for place, tensor in enumerate(inputs):
            if tensor.grad is None:
                continue
            before = self._found[place]
            if place in self._whole:
                self._rows(place, index).copy_(tensor.grad)
                self._missing[place].discard(index)
                self._found[place] = self._whole[place]
            elif before is not None:  # shared by all: they are computed one after another
                before.add_(tensor.grad)
            else:  # which may be a view of a gradient that others still need: none is added to
                self._found[place] = tensor.grad.clone() if self._shape.chunks > 1 else tensor.grad

    def all(self) -> list[torch.Tensor | None]:
        """Of every input; None where none was found."""
        for place, missing in self._missing.items():
            for index in missing if self._found[place] is not None else ():
                self._rows(place, index).zero_()
        return self._found

    def _rows(self, place: int, index: int) -> torch.Tensor:
        return _rows(self._whole[place], self._shape, index)


def _own(outputs: list[Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensor outputs that are no input passed through."""
    return [out for out in outputs if isinstance(out, torch.Tensor) and all(out is not i for i in inputs)]


def _differentiate(roots: list[Root], grads: list[torch.Tensor | None], shape: CallShape, index: int) -> None:
    pairs = [
        (root.edge, _grad_piece(grad, root.shape, shape, index))
        for root, grad in zip(roots, grads, strict=True)
        if root.edge is not None
    ]
    wanted = [(edge, grad) for edge, grad in pairs if grad is not None]
    if wanted:
        torch.autograd.backward([edge for edge, _ in wanted], [grad for _, grad in wanted])


def _grad_piece(grad: torch.Tensor | None, output: torch.Size, shape: CallShape, index: int) -> torch.Tensor | None:
    """The gradient of this micro-batch's output. Of an output that is the same for every micro-batch, the first one
    carries the whole gradient."""
    if grad is None or shape.chunks == 1 or shape.kind == "LOSS":
        return grad
    if output == grad.shape:
        return grad if index == 0 else None
    start = index * shape.chunk_rows
    return grad.narrow(0, start, output[0])
