"""What stands in the place of a unit's forward, and the autograd Function that runs it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_unflatten

from spillway.model.binding import bind
from spillway.model.profile import CallShape, UnitCall
from spillway.model.units import Unit
from spillway.runtime.calls import (
    FlatCall,
    PassedThrough,
    fitted,
    flatten_call,
    own_copy,
    run_backward,
    run_forward,
    run_kept_backward,
)
from spillway.runtime.written import writes_returned
from spillway.spec.defaults import as_it_is
from spillway.spec.errors import UsageError

if TYPE_CHECKING:
    from spillway.runtime.session import Session


# Given a unit's forward: one that also returns what the unit gives by another way than what it returns, and what takes
# that out of its result again and hands it on.
SideOutputs = Callable[[Callable[..., Any]], tuple[Callable[..., Any], Callable[[Any], Any]]]


def returned_alone(original: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """The SideOutputs of a unit that gives nothing else."""
    return original, as_it_is


class UnitForward:
    """Callable in the place of a module's `forward`: runs inside a step, on its own, or under the profiler."""

    def __init__(self, session: "Session", unit: int, member: str, original: Callable[..., Any]) -> None:
        self._session = session
        self._unit = unit
        self._member = member
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the original forward returns."""
        function, hand_on = self._session.side_outputs(self.original)
        if not torch.is_grad_enabled():  # it is computed once, with the lists and dicts of the caller
            return hand_on(self._session.call(UnitCall(self._unit, self._member, function, args, kwargs)))
        function, (args, kwargs), write = writes_returned(function, (args, kwargs))
        return hand_on(write(self._session.call(UnitCall(self._unit, self._member, function, args, kwargs))))


def stand_in(session: "Session", units: tuple[Unit, ...], placeholders: dict[str, nn.Parameter]) -> None:
    """Put a UnitForward in the place of every member's forward, and placeholders in that of its parameters."""
    for index, unit in enumerate(units):
        bind(unit, placeholders)
        for path, module in unit.members:
            if module._compiled_call_impl is None:
                module.forward = UnitForward(session, index, path, module.forward)
            else:  # by Module.compile: what is compiled is the unit's own forward, not what stands for it
                module._compiled_call_impl = UnitForward(session, index, path, module._compiled_call_impl)


def is_streamed(module: nn.Module) -> bool:
    """Whether something stands in the place of its forward."""
    return any(isinstance(found, UnitForward) for found in (vars(module).get("forward"), module._compiled_call_impl))


def stand_down(units: tuple[Unit, ...], params: dict[str, nn.Parameter]) -> None:
    """Give modules their own forwards back, and these parameters."""
    for unit in units:
        bind(unit, params)
        for _, module in unit.members:
            module.__dict__.pop("forward", None)
            if isinstance(module._compiled_call_impl, UnitForward):
                module._compiled_call_impl = module._compiled_call_impl.original


def original_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward a unit's member had before it was streamed."""
    stands: Any = module.forward if module._compiled_call_impl is None else module._compiled_call_impl
    original: Callable[..., Any] = stands.original
    return original


def run_in_step(session: "Session", index: int, unit_call: UnitCall) -> Any:
    """One call of the step's forward, differentiable."""
    call, tensors = flatten_call(unit_call.function, unit_call.args, unit_call.kwargs)
    planned = session.shape(index)
    shape = fitted(call, planned, tensors)
    known = (tensor for hole, tensor in zip(call.holes, tensors, strict=True) if hole in planned.inputs)
    if sum(tensor.numel() for tensor in known) > planned.elements:
        session.note_larger(call.name)
    if not shape.differentiated:
        return _run_frozen(session, index, call, shape, tensors)
    box: dict[str, Any] = {}
    outputs = _UnitFunction.apply(session, index, call, shape, box, session.anchor, *tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    fresh = iter(outputs)
    leaves = [
        tensors[leaf.index] if isinstance(leaf, PassedThrough) else next(fresh) if leaf is _TENSOR else leaf
        for leaf in box["leaves"]
    ]
    return tree_unflatten(leaves, box["spec"])


def _run_frozen(session: "Session", index: int, call: FlatCall, shape: CallShape, tensors: list[torch.Tensor]) -> Any:
    """A call that has no backward: all is frozen in it and before it. Raises UsageError where that is not so."""
    if any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            f"{call.name} was given a tensor that requires a gradient, but in earlier batches none did: let the first "
            f"batch exercise everything that is trained"
        )
    streams = min(session.forks.streams(index), shape.chunks)
    with session.forward_of(index) as (slot, weights):
        found, spec, _ = run_forward(call, shape, tensors, session.device, streams, slot, weights.values(), None, None)
    return tree_unflatten([tensors[leaf.index] if isinstance(leaf, PassedThrough) else leaf for leaf in found], spec)


_TENSOR = object()  # a place among the leaves that is filled with an output of the Function


class _UnitFunction(torch.autograd.Function):
    """A unit's call. `anchor` requires a gradient, so that backward reaches units none of whose inputs do."""

    @staticmethod
    def forward(
        ctx: Any,
        session: "Session",
        index: int,
        call: FlatCall,
        shape: CallShape,
        box: dict[str, Any],
        anchor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        needs_grad = [bool(need) for need in ctx.needs_input_grad[6:]]
        marked = [
            tensor.detach().requires_grad_(need) if need else tensor
            for tensor, need in zip(tensors, needs_grad, strict=True)
        ]
        streams = min(session.forks.streams(index), shape.chunks)
        with session.forward_of(index) as (slot, weights):
            graph = session.activations.new_graph(index, call, marked, slot, weights)
            tape = session.activations.new_tape(index, call)
            device = session.device
            leaves, box["spec"], replay = run_forward(
                call, shape, marked, device, streams, slot, weights.values(), graph, tape
            )
            if graph is None:
                kept = session.activations.keep_inputs(index, call, list(tensors), tape)
            else:
                session.activations.keep_graph(index, graph)
                kept = []
        outputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        box["leaves"] = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.mark_non_differentiable(*(out for out in outputs if not (out.is_floating_point() or out.is_complex())))
        ctx.set_materialize_grads(False)
        ctx.step = (session, session.step_number, index, call, shape, replay, graph, tape, kept, needs_grad, streams)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.step is None:
            raise UsageError(
                "backward ran a second time over one forward (retain_graph=True?), whose activations were given back: "
                "add the losses up and call backward once"
            )
        session, step_number, index, call, shape, replay, graph, tape, kept, needs_grad, streams = ctx.step
        session.check_current(step_number)
        _refuse_other_backwards(session, grads)
        device = session.device
        with session.backward_of(index) as (slot, gradients):
            if graph is not None:
                graph.bring_back(slot, gradients, session.activations.back(index))
                found = run_kept_backward(call, shape, list(grads), graph, device, streams)
                graph.close()
            else:
                tensors = session.activations.bring_inputs(index, call, kept, tape)
                with session.computed_again(index):
                    found = run_backward(call, shape, tensors, needs_grad, list(grads), replay, tape, device, streams)
            # Of what a Function saved and returns as a gradient, or of an input that came back: others lie there next.
            passing = [slot, *session.activations.lent(index)]
            found = [grad if grad is None else own_copy(grad, passing) for grad in found]
        ctx.step = None
        return (None, None, None, None, None, None, *found)


def _refuse_other_backwards(session: "Session", grads: tuple[torch.Tensor | None, ...]) -> None:
    """Raise UsageError for a backward that is none of a step."""
    if torch.is_grad_enabled():
        raise UsageError(
            "create_graph=True asks for gradients of gradients (a gradient penalty?), for which the whole model would "
            "have to be in memory: use a loss without them"
        )
    if not torch._C._will_engine_execute_node(get_gradient_edge(session.anchor).node):
        raise UsageError(
            "torch.autograd.grad wants the gradients of inputs alone, and a backward through a model that streams "
            "trains it: call loss.backward(), or use a model in memory for gradients of inputs"
        )
    if any(isinstance(grad, FakeTensor) for grad in grads):
        raise UsageError(
            "the loss was computed with a placeholder (fake) tensor that a hook kept of the forward in which its step "
            "was planned: let the hook begin anew in every forward (clear what it gathers in a forward pre-hook of "
            "the model that is registered after prepare)"
        )
