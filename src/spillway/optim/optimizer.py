"""The torch.optim.Optimizer the user holds: parameter groups and schedulers work on it; the arithmetic is elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spillway.optim.config import Rule
from spillway.optim.update import Hyper
from spillway.spec.errors import UsageError


class StreamingOptimizer(torch.optim.Optimizer):
    """AdamW whose states rest in the store. Its parameters are placeholders: they have shapes and names, no values.

    The update runs during `loss.backward()`, or unit by unit in the next forward, as the plan says; `step()` ends the
    step either way, and whatever looks at the model next sees it whole. The learning rate in force is the one in
    `param_groups` when the forward begins, so schedulers are stepped after `step()`, as usual.
    """

    def __init__(
        self, settings: Rule, params: dict[str, nn.Parameter], finish: Callable[[], Any], first_step: int = 0
    ) -> None:
        decayed = [param for param in params.values() if param.requires_grad and _decays(param, settings)]
        plain = [param for param in params.values() if param.requires_grad and not _decays(param, settings)]
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in ((decayed, settings.weight_decay), (plain, 0.0))
            if group
        ]
        super().__init__(groups, {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": 0.0})
        self.num_steps = first_step
        self.last_result: Any = None
        self._finish = finish

    def group_of(self) -> dict[int, int]:
        """The index of the parameter group of each placeholder, by id."""
        return {id(param): index for index, group in enumerate(self.param_groups) for param in group["params"]}

    def hypers(self) -> list[Hyper]:
        """The settings of the coming step, per group."""
        return [
            Hyper(
                float(group["lr"]),
                group["betas"][0],
                group["betas"][1],
                group["eps"],
                group["weight_decay"],
                self.num_steps + 1,
            )
            for group in self.param_groups
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End the step: its gradients and their norm are complete, and its updates made or due. Raises NonFinite or
        DiskError; the step was not kept then."""
        if closure is not None:
            raise UsageError("closures are not supported: call loss.backward() and then optimizer.step()")
        self.last_result = self._finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients start at zero after every step."""


def _decays(param: nn.Parameter, settings: Rule) -> bool:
    return settings.decay_all or param.dim() > 1
