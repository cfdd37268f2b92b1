"""What a training run can be told."""

import math
import os
import re
from dataclasses import dataclass, fields
from typing import Any

from spillway.spec.errors import UsageError
from spillway.spec.plan import ACTIVATIONS, TIERS, UPDATE_MODES
from spillway.spec.sizes import format_size, parse_size
from spillway.spec.state import CLIP_BY

_CHOICES: dict[str, tuple[object, ...]] = {
    "clip_by": CLIP_BY,
    "dtype": ("bfloat16", "float16", "float32", "bf16", "fp16", "fp32"),  # the short ones are made long
    "update": ("auto", *UPDATE_MODES),
    "non_finite": ("stop", "skip"),
    "activations": ACTIVATIONS,
    "weights": ("auto", *TIERS),
    "states": ("auto", *TIERS),
    "lr_scheduler_type": (
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ),
    "master_bits": (32, 24),
}
_SMALLEST_BUDGET = 10**6
_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Everything a run can be told; names and meanings follow Hugging Face's TrainingArguments where they exist."""

    model: str
    data: tuple[str, ...]
    output_dir: str
    store: tuple[str, ...] = ()
    device: str = "auto"
    device_memory: str | None = None
    host_memory: str | None = None
    disk_memory: str | None = None
    learning_rate: float = 2e-5
    num_train_epochs: float = 1.0
    max_steps: int = -1
    max_length: int = 2048
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    eval_data: tuple[str, ...] = ()
    eval_steps: int = 100
    save_steps: int = 100
    save_total_limit: int = 1
    resume_from_checkpoint: bool = False
    max_grad_norm: float = 1.0
    clip_by: str = "norm"
    loss_scale: str = "auto"
    optim: str = "adamw"
    master_bits: int = 32
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    warmup_ratio: float = 0.03
    lr_scheduler_type: str = "cosine"
    seed: int = 42
    packing: bool = True
    dtype: str = "bfloat16"
    update: str = "auto"
    activations: str = "auto"
    weights: str = "auto"
    states: str = "auto"
    policy: str = "auto"
    streams: int | None = None
    label_smoothing_factor: float = 0.0
    non_finite: str = "stop"
    max_writes: str | None = None
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _LONG.get(self.dtype, self.dtype))
        for name in ("model", "output_dir"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        for name in ("data", "eval_data", "store"):
            object.__setattr__(self, name, tuple(map(os.path.expanduser, getattr(self, name))))

    @property
    def fixed_loss_scale(self) -> float | str | None:
        """A number, "dynamic", or None for what the dtype needs. Raises UsageError."""
        if self.loss_scale in ("auto", "dynamic"):
            return None if self.loss_scale == "auto" else self.loss_scale
        try:
            return float(self.loss_scale)
        except ValueError as error:
            raise UsageError(f"--loss-scale {self.loss_scale} is not auto, dynamic or a number") from error

    def placement(self) -> dict[str, Any]:
        """What `spillway.prepare` is told of memory and placement."""
        return {
            "device": self.device,
            "device_memory": self.device_memory,
            "host_memory": self.host_memory,
            "disk_memory": self.disk_memory,
            "micro_batch": self.per_device_train_batch_size,
            "update": self.update,
            "activations": self.activations,
            "weights": self.weights,
            "states": self.states,
            "policy": self.policy,
            "streams": self.streams,
            "label_smoothing": self.label_smoothing_factor,
        }

    def check(self) -> None:
        """Raise UsageError naming the first value that makes no sense."""
        positive = ("learning_rate", "num_train_epochs", "max_length", "per_device_train_batch_size",
                    "gradient_accumulation_steps", "eval_steps", "save_steps")  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(self, name)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"--{field.name.replace('_', '-')} must be a finite number, not {value}")
        if self.streams is not None and self.streams < 1:
            raise UsageError(f"--streams must be at least 1, or left out for the planner to choose, not {self.streams}")
        if self.save_total_limit < 0:
            raise UsageError(f"--save-total-limit must be at least 0, not {self.save_total_limit}")
        if self.max_steps == 0 or self.max_steps < -1:
            raise UsageError("--max-steps must be more than 0, or left out for whole epochs")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed must be from 0 to 2^63 - 1, not {self.seed}")
        if self.weight_decay < 0:
            raise UsageError(f"--weight-decay must not be negative, as {self.weight_decay} is")
        if self.master_bits == 24 and self.dtype != "bfloat16":
            raise UsageError(f"--master-bits 24 is for bfloat16 weights, not for {self.dtype}")
        if self.max_grad_norm < 0:
            raise UsageError(f"--max-grad-norm must be more than 0, or 0 for no clipping, not {self.max_grad_norm}")
        if self.clip_by != "norm" and not self.max_grad_norm:
            raise UsageError(f"--clip-by {self.clip_by} clips nothing with --max-grad-norm 0: leave one of them out")
        if "" in (*self.store, *self.data, *self.eval_data):
            raise UsageError("a path is empty: is a variable of the shell not set?")
        scale = self.fixed_loss_scale
        if isinstance(scale, float) and not 0 < scale < math.inf:
            raise UsageError(f"--loss-scale must be auto, dynamic or a number above 0, not {self.loss_scale}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be in [0, 1), not {getattr(self, name)}")
        check_device(self.device)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} is not one of {', '.join(map(str, known))}"
                )
        for name in ("device_memory", "host_memory", "disk_memory", "max_writes"):
            _check_size(name, getattr(self, name))
        if self.max_length < 2:
            raise UsageError("--max-length must be at least 2: a token is predicted from the one before it")
        if not 0 < self.adam_epsilon < math.inf:
            raise UsageError(f"--adam-epsilon must be more than 0, not {self.adam_epsilon}")
        if not 0 <= self.label_smoothing_factor < 1:
            raise UsageError(f"--label-smoothing-factor must be in [0, 1), not {self.label_smoothing_factor}")
        if not 0 <= self.warmup_ratio < 1:
            raise UsageError(f"--warmup-ratio must be in [0, 1), not {self.warmup_ratio}")


def check_device(name: str) -> None:
    """Raise UsageError for what no device is called."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"the device '{name}' is not one of auto, cuda, cuda:1, cpu")


def _check_size(name: str, text: str | None) -> None:
    if text is None:
        return
    flag = f"--{name.replace('_', '-')}"
    try:
        size = parse_size(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from error
    if size < _SMALLEST_BUDGET:
        hint = f": write a unit, for example {text.strip()}GB" if text.strip().isdigit() and size else ""
        raise UsageError(f"{flag} {text} is {format_size(size)}, less than anything can be done with{hint}")
