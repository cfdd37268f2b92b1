"""What becomes of gradients before the update: clipped, and unscaled where the loss was scaled."""

import math
from dataclasses import dataclass

import torch

from spillway.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Clipping:
    """`by`: the exact global norm of all gradients, as torch.nn.utils.clip_grad_norm_; the norm of each unit (a block,
    the embedding, the head) by itself, known as soon as its gradient is; or the value of each element, as
    clip_grad_value_. `limit`: None clips nothing."""

    by: str = "norm"
    limit: float | None = None

    @property
    def waits_for_norm(self) -> bool:
        """Whether no gradient is final before all are known."""
        return self.by == "norm" and self.limit is not None

    def of_all(self, norm: float) -> float:
        """The factor for every gradient, by their global norm."""
        return clip_scale(norm, self.limit if self.by == "norm" else None)

    def of_unit(self, norm: float) -> float:
        """The factor for a unit's gradient, by its norm."""
        return clip_scale(norm, self.limit if self.by == "unit" else None)

    def clamp(self, grad: torch.Tensor, loss_scale: float) -> None:
        """Bound each element, in place; the gradient is that of a scaled loss."""
        if self.by == "value" and self.limit is not None:
            limit = min(self.limit * loss_scale, torch.finfo(grad.dtype).max)  # which a scaled one may pass
            grad.clamp_(-limit, limit)


def clip_scale(norm: float, max_norm: float | None) -> float:
    """The factor torch.nn.utils.clip_grad_norm_ multiplies gradients by."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


# Of torch.amp.GradScaler; powers of two, so that scaling loses no bit.
_FIRST, _LARGEST, _INTERVAL = 2.0**16, 2.0**24, 2000


@dataclass(slots=True)
class LossScale:
    """What the loss is multiplied by before backward, so that small float16 gradients do not vanish.

    A dynamic one is halved by a step whose gradients overflow, which is then skipped, and doubled after 2,000 steps in
    a row that did not, as torch.amp.GradScaler does.
    """

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, wanted: float | str | None, is_half: bool) -> "LossScale":
        """From "dynamic" (the default of float16), a number, or None. Raises UsageError for anything else."""
        if wanted is None:
            wanted = "dynamic" if is_half else 1.0
        if wanted == "dynamic":
            return cls(_FIRST, True)
        if isinstance(wanted, str) or not (math.isfinite(wanted) and wanted > 0):
            raise UsageError(f"loss_scale must be 'dynamic', a number above 0, or None, not {wanted!r}")
        return cls(float(wanted))

    @property
    def at_floor(self) -> bool:
        """Whether an overflow can no longer be blamed on the scale."""
        return not self.is_dynamic or self.value <= 1.0

    def overflowed(self) -> None:
        """A step was skipped."""
        self.value, self.good_steps = max(self.value / 2, 1.0), 0

    def advanced(self) -> None:
        """A step was made."""
        self.good_steps += 1
        if self.is_dynamic and self.good_steps >= _INTERVAL:
            self.value, self.good_steps = min(2 * self.value, _LARGEST), 0
