"""What a model is, as far as the plan cares."""

from dataclasses import dataclass

PAGE = 4096


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """What is streamed as a whole. All sizes are of the whole unit, in bytes, rounded up to whole pages."""

    name: str
    num_params: int
    num_trainable: int
    weight_bytes: int
    grad_bytes: int
    state_bytes: int  # lower master half, m and v


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

    @property
    def kept_bytes(self) -> int:
        """Room for input and all that autograd saves, each tensor at a whole page."""
        return self.act_bytes + self.saved_bytes // PAGE * PAGE + PAGE * (self.saved_count + 1) * self.chunks


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Units in the order of the module tree and their calls in the order of the forward."""

    units: tuple[UnitProfile, ...]
    calls: tuple[CallProfile, ...]
    boundary_bytes: int = 0  # tensors between units that stay on the device for the whole step
    resident_unit: int | None = None  # parameters used outside any unit's forward; bound for the whole step
    tokens: int = 0  # in the batch, for throughput
    update_bytes: int = 14  # of one trainable element in all its arrays and its gradient, at most
