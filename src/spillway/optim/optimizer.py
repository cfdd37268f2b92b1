"""The torch.optim.Optimizer the user holds: parameter groups and schedulers work on it; the arithmetic is elsewhere."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from spillway.optim.clip import LossScale
from spillway.optim.config import Rule
from spillway.optim.groups import NamedGroup
from spillway.optim.update import Hyper
from spillway.spec.errors import NonFinite, SkippedStep, UsageError
from spillway.spec.trace import StepResult


class StreamingOptimizer(torch.optim.Optimizer):
    """AdamW, Lion or SGD, whose states rest in the store. Its parameters are placeholders: they have shapes and names
    and no values.

    The update runs during `loss.backward()`, or unit by unit in the next forward, as the plan says; `step()` ends the
    step either way, and whatever looks at the model next sees it whole. The learning rate in force is the one in
    `param_groups` when the forward begins, so schedulers are stepped after `step()`, as usual. `own_groups` come first
    there; what is in none of them is in one group that decays and one that does not.
    """

    # So GradScaler calls `step` with `grad_scale` set, which is refused there; it would look for gradients otherwise.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        settings: Rule,
        params: dict[str, nn.Parameter],
        loss_scale: LossScale,
        finish: Callable[[], StepResult],
        drop_gradients: Callable[[], None],
        first_step: int = 0,
        own_groups: Sequence[NamedGroup] = (),
    ) -> None:
        trained = {name: param for name, param in params.items() if param.requires_grad}
        groups = []
        for own in own_groups:
            names = [name for each in own.params for name in sorted(each) if name in trained]
            groups.append({"params": [trained.pop(name) for name in names], **own.options})
        decayed = [param for param in trained.values() if _decays(param, settings)]
        plain = [param for param in trained.values() if not _decays(param, settings)]
        rest = ((decayed, settings.weight_decay), (plain, 0.0))
        groups += [{"params": group, "weight_decay": decay} for group, decay in rest if group]
        shared = {name: getattr(settings, name) for name in ("lr", "betas", "eps", "weight_decay")}
        super().__init__(groups, shared)
        self.num_steps = first_step
        self._opt_called = first_step > 0  # or a scheduler that is brought to this step would warn that it came first
        self.last_result = StepResult()
        self.loss_scale = loss_scale
        self.skipped_steps = 0
        self._is_scaled = False  # a loss of this step was
        self._finish = finish
        self._drop_gradients = drop_gradients
        self._is_complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made. Raises UsageError later: what is trained was laid out by `prepare`."""
        if getattr(self, "_is_complete", False):
            raise UsageError("what is trained was laid out by spillway.prepare: parameters cannot be added afterwards")
        super().add_param_group(param_group)

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

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to go backward: multiplied by the loss scale where there is one. `optimizer.scale(loss).backward()`
        is right for every dtype."""
        self._is_scaled = True
        return loss if self.loss_scale.value == 1.0 else loss * self.loss_scale.value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """End the step: its gradients and their norm are complete, and its updates made or due. Under a dynamic loss
        scale a step whose gradients overflow is skipped, with a SkippedStep warning: nothing has changed but the
        scale, and `last_result.skipped` is set. Raises NonFinite or DiskError; the step was not kept then."""
        if closure is not None:
            raise UsageError("closures are not supported: call loss.backward() and then optimizer.step()")
        if hasattr(self, "grad_scale"):
            raise UsageError(
                "gradients of a model that streams are used before a GradScaler could unscale them: leave it out and "
                "call optimizer.scale(loss).backward() and optimizer.step()"
            )
        if self.loss_scale.value != 1.0 and not self._is_scaled:
            raise UsageError(
                "the loss of this step was not scaled, so its gradients would be taken as too small: call "
                "optimizer.scale(loss).backward(), or give the optimizer loss_scale=1.0"
            )
        self._is_scaled = False
        try:
            self.last_result = self._finish()
        except NonFinite as error:
            if self.loss_scale.at_floor:
                raise
            self.loss_scale.overflowed()
            self.skipped_steps += 1
            self.last_result = StepResult(skipped=True, reason=str(error))
            warnings.warn(
                f"step {self.num_steps + 1} is skipped, {self.skipped_steps} so far: gradients overflow; the loss "
                f"scale is now {self.loss_scale.value:g}",
                SkippedStep,
                stacklevel=2,
            )

    def advanced(self) -> None:
        """A step was made."""
        self.num_steps += 1
        self.loss_scale.advanced()

    def saved(self) -> dict[str, str]:
        """What a saved point holds of this besides the number of steps."""
        return {"loss_scale": json.dumps(asdict(self.loss_scale))} if self.loss_scale.is_dynamic else {}

    def restore(self, step: int, saved: dict[str, str]) -> None:
        """Go on from a saved point."""
        self.num_steps = step
        if self.loss_scale.is_dynamic and "loss_scale" in saved:
            found = json.loads(saved["loss_scale"])
            self.loss_scale.value, self.loss_scale.good_steps = found["value"], found["good_steps"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Settings of groups only. Raises UsageError for states, which would be passed over: those of this rest in the
        store."""
        if state_dict.get("state"):
            raise UsageError(
                "optimizer states rest in the store and are not loaded from a state_dict: resume with prepare(..., "
                "resume=True), or begin with new ones"
            )
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what backwards of an unfinished step have summed. (Gradients start at zero after every step.) Raises
        UsageError where it is too late for that: once the backward that completes a step has begun its updates."""
        self._drop_gradients()


def _decays(param: nn.Parameter, settings: Rule) -> bool:
    return settings.decay_all or param.dim() > 1
