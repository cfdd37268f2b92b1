"""What the user asks of the optimizer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdamW:
    """Settings of AdamW (Loshchilov and Hutter 2019), exact: fp32 master weights and moments.

    Norm weights and biases (parameters of one dimension) are not decayed unless `decay_all`. `max_grad_norm` clips by
    the exact global norm of all gradients, as torch.nn.utils.clip_grad_norm_ does; None turns clipping off.
    """

    lr: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    decay_all: bool = False
