"""What a model is, as far as the plan cares."""

from dataclasses import dataclass, replace

from spillway.spec.sizes import PAGE


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """What is streamed as a whole. All sizes are of the whole unit, in bytes, rounded up to whole pages."""

    name: str
    num_params: int
    num_trainable: int
    weight_bytes: int
    grad_bytes: int
    state_bytes: int  # lower master half, m and v

    @property
    def trained_bytes(self) -> int:
        """Of the weights that are trained; each has a gradient of its size."""
        return self.grad_bytes

    @property
    def updated_bytes(self) -> int:
        """What an update goes through: trained weights and states."""
        return self.trained_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class OperatorClass:
    """Alike operators of one call, all micro-batches together."""

    name: str
    flops: float
    num_bytes: int  # of their outputs, each at a whole page
    count: int  # of outputs
    cheap: bool = False  # run again rather than kept

    @property
    def benefit(self) -> float:
        """FLOPs saved by each byte kept (LoHan, equation 6)."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    def cut(self, chunks: int) -> "OperatorClass":
        """The same in so many micro-batches: outputs are smaller and more, each of which may end within a page."""
        if chunks == 1:
            return self
        return replace(self, num_bytes=self.num_bytes + PAGE * self.count * chunks, count=self.count * chunks)


@dataclass(frozen=True, slots=True)
class CallProfile:
    """One call of a unit in the forward. A unit called twice (tied embeddings, shared blocks) has two."""

    unit: int
    flops: float  # forward, whole batch
    act_bytes: int  # inputs that backward needs and nothing else keeps on the device
    saved_bytes: int  # what autograd would save inside the unit, whole batch
    kind: str = "FORWARD"  # or "LOSS": the head and the chunked cross-entropy in one
    chunks: int = 1  # micro-batches, or pieces of the loss
    saved_count: int = 0  # tensors that `saved_bytes` are of
    operators: tuple[OperatorClass, ...] = ()  # highest benefit first
    work_bytes: int = 0  # of the device while a micro-batch is computed, forward and backward; 0 where unknown
    heap_bytes: int = 0  # of these, those in tensors so small that a C library's heap keeps them
    differentiated: bool = True  # not where all is frozen before it and in it: then it has no backward
    forks: bool = False  # whether its micro-batches may be computed side by side

    @property
    def saved_room(self) -> int:
        """Bytes of all that autograd saves, each tensor at a whole page."""
        return self.saved_bytes // PAGE * PAGE + PAGE * (self.saved_count + 1) * self.chunks

    @property
    def tapeable(self) -> tuple[OperatorClass, ...]:
        """Those whose outputs are worth keeping, the highest benefit first."""
        return tuple(operator for operator in self.operators if not operator.cheap)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Units in the order of the module tree and their calls in the order of the forward."""

    units: tuple[UnitProfile, ...]
    calls: tuple[CallProfile, ...]
    boundary_bytes: int = 0  # tensors between units that stay on the device for the whole step
    resident_units: frozenset[int] = frozenset()  # used outside of their calls, too: bound for the whole step
    tokens: int = 0  # in the batch, for throughput
    update_bytes: int = 14  # of one trainable element in all its arrays and its gradient, at most
    calls_beside: bool = False  # units are also called without gradients, each fetched by itself

    def backward_flops(self, call: CallProfile) -> float:
        """Of a call, without what is computed again: as many as in forward for the gradients of its inputs, and for
        those of its weights as far as they are trained."""
        if not call.differentiated:
            return 0.0
        unit = self.units[call.unit]
        return call.flops * (1 + min(unit.num_trainable / max(unit.num_params, 1), 1.0))
