"""What the user asks of the optimizer."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spillway.optim.clip import Clipping, LossScale
from spillway.spec.errors import UsageError
from spillway.spec.options import TrainOptions
from spillway.spec.state import CLIP_BY, MOMENTS, StateFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every rule has.

    Norm weights and biases (parameters of one dimension) are not decayed unless `decay_all`. `max_grad_norm` clips by
    the exact global norm of all gradients, as torch.nn.utils.clip_grad_norm_ does; None turns clipping off. `clip_by`:
    "norm", or "unit" (each unit by its own norm) or "value" (each element), which wait for no other gradient; the limit
    is `max_grad_norm` for them, too.

    `loss_scale`: None (dynamic where parameters are float16), "dynamic" or a number; then `optimizer.scale(loss)` is
    what goes backward, and with a dynamic one a step that overflows is skipped. `may_skip`: a step whose gradients are
    not finite leaves nothing changed even where nothing is clipped, so that training may go on; updates then wait for
    the norm.

    `moments`: "float32" (exact), "bfloat16" or "8bit". `master_bits`: 32 (exact) or 24, for bfloat16 weights. Narrow
    ones are rounded stochastically. On disk a parameter takes 4 bytes plus those of its moments; 3 with 24 bits.
    """

    max_grad_norm: float | None = 1.0
    clip_by: str = "norm"
    loss_scale: float | str | None = None
    may_skip: bool = False
    decay_all: bool = False
    moments: str = "float32"
    master_bits: int = 32

    @property
    def clipping(self) -> Clipping:
        """What becomes of gradients that are too large."""
        return Clipping(self.clip_by, self.max_grad_norm)

    def waits_for_norm(self, is_half: bool) -> bool:
        """Whether no update is final before all gradients are known: to clip by their norm, or to skip the step.
        `is_half`: of float16 parameters."""
        is_dynamic = LossScale.of(self.loss_scale, is_half).is_dynamic
        return self.clipping.waits_for_norm or is_dynamic or self.may_skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Settings):
    """AdamW (Loshchilov and Hutter 2019); exact, with fp32 master weights and moments, unless narrowed.

    Its defaults are those of torch.optim.AdamW, but for `lr`, `max_grad_norm` and what is not decayed; the command
    line's are those of transformers.
    """

    lr: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    rule: ClassVar[str] = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(Settings):
    """Lion (Chen et al. 2023, Algorithm 2): one moment, steps of equal size."""

    lr: float = 2e-6
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1

    rule: ClassVar[str] = "lion"
    eps: ClassVar[float] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Settings):
    """SGD with momentum, as in torch.optim.SGD (weight decay is added to the gradient)."""

    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0

    rule: ClassVar[str] = "sgd"
    eps: ClassVar[float] = 0.0

    @property
    def betas(self) -> tuple[float, float]:
        """The momentum, where the other rules have their betas."""
        return (self.momentum, 0.0)


Rule = AdamW | Lion | SGD
# The names of --optim: the class and its moments.
NAMED: dict[str, tuple[type[AdamW] | type[Lion] | type[SGD], str]] = {
    "adamw": (AdamW, "float32"),
    "adamw_bf16": (AdamW, "bfloat16"),
    "adamw_8bit": (AdamW, "8bit"),
    "lion": (Lion, "float32"),
    "lion_8bit": (Lion, "8bit"),
    "sgd": (SGD, "float32"),
}


def check_hyper(values: Mapping[str, Any]) -> None:
    """Raise UsageError for an `lr`, `weight_decay`, `eps` or `betas` that no step can be made with. An eps of 0 is
    none: a gradient of zero, as that of a token which is not in the batch, would make a weight nan."""
    for name, value in values.items():
        if name in ("lr", "weight_decay") and not 0 <= value < math.inf:
            raise UsageError(f"{name} must be a number that is not negative, not {value}")
        if name == "eps" and not 0 < value < math.inf:
            raise UsageError(f"eps must be more than 0, not {value}")
        if name == "betas" and not all(0 <= beta < 1 for beta in value):
            raise UsageError(f"betas and momentum must be in [0, 1), not {value}")


def state_format(settings: Rule) -> StateFormat:
    """What these settings keep of every parameter. Raises UsageError for widths and values there are not."""
    check_hyper({name: getattr(settings, name) for name in ("lr", "betas", "weight_decay")})
    if settings.rule == "adamw":
        check_hyper({"eps": settings.eps})
    if settings.max_grad_norm is not None and not settings.max_grad_norm > 0:
        raise UsageError(f"max_grad_norm must be more than 0, or None for no clipping, not {settings.max_grad_norm}")
    if settings.clip_by not in CLIP_BY:
        raise UsageError(f"clip_by={settings.clip_by!r} is not one of {', '.join(CLIP_BY)}")
    if settings.moments not in MOMENTS:
        raise UsageError(f"moments={settings.moments!r} is not one of {', '.join(MOMENTS)}")
    if settings.master_bits not in (32, 24):
        raise UsageError(f"master_bits must be 32 or 24, not {settings.master_bits}")
    return StateFormat(settings.rule, settings.moments, settings.master_bits - 16)


def settings_of(options: TrainOptions) -> Rule:
    """What the options of a run ask for. Raises UsageError for an optimizer there is not."""
    if options.optim not in NAMED:
        near = difflib.get_close_matches(options.optim, NAMED, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"optim={options.optim!r} is not one of {', '.join(NAMED)}{hint}")
    kind, moments = NAMED[options.optim]
    made: dict[str, Any] = {
        "lr": options.learning_rate,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm if options.max_grad_norm > 0 else None,
        "clip_by": options.clip_by,
        "loss_scale": options.fixed_loss_scale,
        "may_skip": options.non_finite == "skip",
        "moments": moments,
        "master_bits": options.master_bits,
    }
    if kind is SGD:
        made["momentum"] = options.adam_beta1
    else:
        made["betas"] = (options.adam_beta1, options.adam_beta2)
    if kind is AdamW:
        made["eps"] = options.adam_epsilon
    return kind(**made)
