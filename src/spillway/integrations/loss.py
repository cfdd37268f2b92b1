"""The head and the loss of a transformers model in one: logits are never whole in memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from spillway.integrations.head import apply_head
from spillway.model.profile import UnitCall
from spillway.runtime.session import Session
from spillway.runtime.unit import original_forward
from spillway.spec.errors import UsageError

# Logits of one piece of the loss, in float32: where a GPU computes, larger ones, for every piece reads the head anew.
_LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
# The gradient of a 16-bit head is rounded once per piece. Up to so many the error is about a hundredth and has no
# direction; beyond, what one piece adds is lost beside the sum of the others.
_MOST_ROUNDINGS = 64
# The losses of transformers that this stands for; whether labels are shifted by one in them.
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


@dataclass(frozen=True, slots=True)
class DeferredLogits:
    """What a head gives in the place of logits: the hidden states, and what the model does with their logits one by
    one (scaling, soft caps). Anything else the model tries with it is an error, and its logits stay whole."""

    hidden: torch.Tensor
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of these logits."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def _then(self, step: Callable[[torch.Tensor], torch.Tensor]) -> "DeferredLogits":
        return replace(self, steps=(*self.steps, step))

    def __mul__(self, factor: float) -> "DeferredLogits":
        _check_number(factor)
        return self._then(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "DeferredLogits":
        _check_number(divisor)
        return self._then(lambda logits: logits / divisor)

    def float(self) -> "DeferredLogits":
        """As Tensor.float."""
        return self._then(torch.Tensor.float)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> "DeferredLogits":
        if func is torch.tanh and len(args) == 1 and not kwargs and isinstance(args[0], cls):
            return args[0]._then(torch.tanh)
        raise TypeError(f"{func} is not done element by element")


def _check_number(value: object) -> None:
    if not isinstance(value, (float, int)):
        raise TypeError(f"logits are scaled by a {type(value).__name__}")


class ChunkedLoss:
    """The head and the cross-entropy as one unit call, a piece of the tokens at a time.

    The model calls `lm_head(hidden)` and then `loss_function(logits, labels, ...)`. In a step with labels the head
    passes the hidden states on untouched and the loss applies it piece by piece. Whether a model does only what
    DeferredLogits knows between the two is seen when its forward is profiled; where not, logits stay whole.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        called: nn.Module,
        session: Session,
        head: nn.Linear,
        place: tuple[int, str],
        label_smoothing: float,
    ) -> None:
        """`place`: the unit of the head, and its name in there."""
        self._model = model
        self._called_module = called
        self._session = session
        self._head = head
        self._smoothing = label_smoothing
        self._whole_loss: Callable[..., torch.Tensor] = model.loss_function
        self._shifts = _SHIFTS[self._whole_loss.__name__]
        self._unit, self._path = place
        self._own_forward = original_forward(head)
        self._wrapped_head = head.forward
        self._deferred = False
        self._called = False
        self._labelled = False
        self._works: bool | None = None  # unknown until profiled

    def install(self) -> None:
        """Put this in the place of the head's forward and the model's loss."""
        self._head.forward = self._forward_head  # type: ignore[assignment,method-assign]
        self._model.loss_function = self._loss
        hooks = (
            self._called_module.register_forward_pre_hook(self._note_labels, with_kwargs=True),
            self._called_module.register_forward_hook(self._drop_logits),
        )
        self._session.on_undo += [hook.remove for hook in hooks]
        self._session.on_undo.append(self._restore_loss)
        self._session.forwards.trials.append(self._try)

    def _restore_loss(self) -> None:
        self._model.loss_function = self._whole_loss

    def _try(self, profile: Callable[[], Any]) -> Any:
        """Profile with deferred logits; again without where the model does more with them than take the loss. Raises
        UsageError where the loss should be smoothed and the model has one of its own."""
        self._called = False
        result = self._try_deferred(profile)
        if self._smoothing and self._labelled and not self._called:
            raise UsageError(_no_smoothing(self._model))
        return result

    def _try_deferred(self, profile: Callable[[], Any]) -> Any:
        if self._works is None:
            self._works = True
            try:
                result = profile()
            except Exception:
                result, self._works = None, False
            if self._labelled and self._deferred:
                self._works = False
            if self._works:
                if not self._labelled:
                    self._works = None
                return result
            self._deferred = False
            try:
                return profile()
            except Exception:  # with whole logits, too: that says nothing of them
                self._works = None
                raise
        return profile()

    def _note_labels(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        needs_loss_alone = torch.is_grad_enabled() or not self._session.wants_logits
        self._labelled = kwargs.get("labels") is not None and needs_loss_alone
        self._deferred = False

    def _forward_head(self, hidden: torch.Tensor) -> Any:
        if not (self._works and self._labelled):
            return self._wrapped_head(hidden)
        self._deferred = True
        return DeferredLogits(hidden)

    def _drop_logits(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, transformers.utils.ModelOutput):
            return type(output)(
                **{key: value for key, value in output.items() if not isinstance(value, DeferredLogits)}
            )
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, DeferredLogits))
        return output

    def _loss(
        self,
        logits: torch.Tensor | DeferredLogits,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._deferred, self._called = False, True
        if not isinstance(logits, DeferredLogits) and not self._smoothing:
            shifted = {"shift_labels": shift_labels} if self._shifts else {}
            return self._whole_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index=ignore_index, **shifted, **kwargs
            )
        targets = labels
        if self._shifts:
            padded = nn.functional.pad(labels, (0, 1), value=ignore_index)
            targets = padded[..., 1:] if shift_labels is None else shift_labels
        targets = targets.reshape(-1)

        def sum_of_losses(scores: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(
                scores.float(), of, ignore_index=ignore_index, reduction="sum", label_smoothing=self._smoothing
            )

        def of_hidden(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            return sum_of_losses(deferred.applied(apply_head(self._head, self._own_forward, rows)), of)

        if isinstance(logits, DeferredLogits):
            deferred, hidden = logits, logits.hidden.reshape(-1, logits.hidden.shape[-1])
            targets, chunk_rows = targets.to(hidden.device), self._piece_rows(len(hidden), vocab_size)
            call = UnitCall(self._unit, self._path, of_hidden, (hidden, targets), {}, "LOSS", chunk_rows)
            total = self._session.call(call)
        else:
            targets = targets.to(logits.device)
            total = sum_of_losses(logits.reshape(-1, vocab_size), targets)
        return total / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)

    def _piece_rows(self, num_rows: int, vocab_size: int) -> int:
        rows = max(_LOGIT_BYTES[self._session.device.kind] // (4 * vocab_size), 1)
        weight = self._head.weight
        is_rounded = weight.requires_grad and weight.dtype.itemsize < 4
        return max(rows, -(-num_rows // _MOST_ROUNDINGS)) if is_rounded else rows


def install_loss(
    model: transformers.PreTrainedModel, called: nn.Module, session: Session, label_smoothing: float
) -> None:
    """Chunk the loss of a model, whose batches `called` is called with, where that is known to be right. Raises
    UsageError where smoothing is asked of a loss that is the model's own."""
    head = model.get_output_embeddings()
    members = ((index, path, module) for index, unit in enumerate(session.units) for path, module in unit.members)
    place = next(((index, path) for index, path, module in members if module is head), None)
    is_plain = isinstance(head, nn.Linear) and head._compiled_call_impl is None
    # (A model without a head would warn of having no loss.)
    if is_plain and place and getattr(getattr(model, "loss_function", None), "__name__", "") in _SHIFTS:
        ChunkedLoss(model, called, session, head, place, label_smoothing).install()
    elif label_smoothing:
        raise UsageError(_no_smoothing(model))


def _no_smoothing(model: nn.Module) -> str:
    return f"label smoothing is not for {type(model).__name__}: its loss is its own"
