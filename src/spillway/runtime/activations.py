"""What backward needs of each call of a step, and where it waits: on the device, or in the activation store."""

from dataclasses import dataclass

import torch

from spillway.model.layouts import Order, inverse, order_of
from spillway.plan.pools import act_lease, stored_bytes
from spillway.runtime.calls import FlatCall
from spillway.runtime.graph import Graph
from spillway.runtime.held import Held, Outgoing
from spillway.runtime.schedules import Schedule
from spillway.runtime.tape import Tape
from spillway.spec.plan import Kept
from spillway.store.arena import SlabPools


@dataclass(frozen=True, slots=True)
class StoredInput:
    """An input of a call that waits for backward in the activation store, so many bytes from the start of its slab."""

    at: int
    shape: torch.Size  # as it lies there
    dtype: torch.dtype
    order: Order  # of its dimensions there


class Activations:
    """Of one forward and its backward. `outgoing`: per call, what its DOWNLOAD takes away."""

    def __init__(self, schedule: Schedule, pools: SlabPools, outgoing: dict[int, Outgoing]) -> None:
        self._schedule = schedule
        self._pools = pools
        self._outgoing = outgoing
        self._graphs: list[Graph] = []

    def close(self) -> None:
        """Backward is over, or will not come."""
        for graph in self._graphs:
            graph.close()

    def new_graph(
        self,
        index: int,
        call: FlatCall,
        tensors: list[torch.Tensor],
        slot: torch.Tensor,
        weights: dict[str, torch.Tensor],
    ) -> Graph | None:
        """What takes all that autograd saves in the forward of a call; None where it is recomputed."""
        if not self._kept(index).everything:
            return None
        own = self._schedule.shapes[index].acts
        shared = [tensor for hole, tensor in zip(call.holes, tensors, strict=True) if hole not in own]
        graph = Graph(call.name, slot, weights, tensors, shared, self._moves(index))
        self._graphs.append(graph)
        return graph

    def keep_graph(self, index: int, graph: Graph) -> None:
        """Hand what autograd saved to the activation store, where that is not the device."""
        if self._moves(index):
            outgoing = self._outgoing[index] = self._new_outgoing(index, graph.name)
            graph.release(outgoing)

    def back(self, index: int) -> torch.Tensor | None:
        """The slab that what was kept of a call has come back to; None where it never left."""
        return self._slab(index) if self._moves(index) else None

    def lent(self, index: int) -> list[torch.Tensor]:
        """The slab of a call whose backward is under way, where it has one."""
        return [self._slab(index)] if self._moves(index) and self._pools.holds([act_lease(index)]) else []

    def new_tape(self, index: int, call: FlatCall) -> Tape | None:
        """What takes outputs of operators in the forward of a call; None where none are kept."""
        kept = self._kept(index)
        return Tape(kept.tape) if kept.tape else None

    def keep_inputs(
        self, index: int, call: FlatCall, tensors: list[torch.Tensor], tape: Tape | None
    ) -> list[Held | StoredInput]:
        """Hand the call's own inputs and its tape to the activation store; what is returned stays with autograd."""
        acts = self._schedule.shapes[index].acts
        if not self._moves(index):
            return list(map(Held.of, tensors))
        outgoing = self._new_outgoing(index, call.name)
        kept: list[Held | StoredInput] = []
        for hole, tensor in zip(call.holes, tensors, strict=True):
            held = Held.of(tensor)
            if hole not in acts:  # one that units share may be expanded: its copy would be many times as large
                kept.append(held)
                continue
            order = order_of(tensor)
            lying = tensor.detach().permute(order).contiguous()
            at = outgoing.put(lying, [held])
            kept.append(held if at is None else StoredInput(at, lying.shape, tensor.dtype, order))
        if tape is not None:
            tape.release(outgoing)
        if outgoing.moves:
            self._outgoing[index] = outgoing
        return kept

    def bring_inputs(
        self, index: int, call: FlatCall, kept: list[Held | StoredInput], tape: Tape | None
    ) -> list[torch.Tensor]:
        """All inputs of the call again, the stored ones as views of their slot; and its tape. Raises UsageError where
        one was changed since."""
        if tape is not None and self._moves(index):
            tape.bring_back(self._slab(index))
        tensors: list[torch.Tensor] = []
        for item in kept:
            if isinstance(item, Held):
                tensors.append(item.unchanged(call.name))
                continue
            stop = item.at + item.shape.numel() * item.dtype.itemsize
            lying = self._slab(index)[item.at : stop].view(item.dtype).view(item.shape)
            tensors.append(lying.permute(inverse(item.order)))
        return tensors

    def _kept(self, index: int) -> Kept:
        return self._schedule.plan.placement.acts[index]

    def _moves(self, index: int) -> bool:
        return self._kept(index).tier != "device"

    def _new_outgoing(self, index: int, name: str) -> Outgoing:
        return Outgoing(name, stored_bytes(self._schedule.profile.calls[index], self._kept(index)))

    def _slab(self, index: int) -> torch.Tensor:
        return self._pools.buffer(act_lease(index))
