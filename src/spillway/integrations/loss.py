"""The head and the loss of a transformers model in one: logits are never whole in memory."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from spillway.integrations.head import apply_head
from spillway.integrations.logits import DeferredLogits
from spillway.model.profile import UnitCall
from spillway.runtime.session import Session
from spillway.runtime.unit import original_forward
from spillway.spec.errors import UsageError

# Logits of one piece of the loss, in float32: where a GPU computes, larger ones, for every piece reads the head anew.
_LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
# The gradient of a 16-bit head is rounded once per piece. Up to so many the error is about a hundredth and has no
# direction; beyond, what one piece adds is lost beside the sum of the others.
_MOST_ROUNDINGS = 64


class ChunkedLoss:
    """The head and the cross-entropy as one unit call, a piece of the tokens at a time.

    In a step with labels the head gives DeferredLogits, and torch.nn.functional.cross_entropy, by whatever loss of
    transformers or the model it is called, takes the loss of them. Whether a model does only what DeferredLogits know
    between the two is seen when its forward is profiled; where not, logits stay whole.
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
        self._called = called
        self._session = session
        self._head = head
        self._smoothing = label_smoothing
        self._unit, self._path = place
        self._own_forward = original_forward(head)
        self._wrapped_head = head.forward
        self._labelled = False
        self._untaken = 0  # deferred logits that no loss was taken of
        self._works: bool | None = None  # unknown until profiled

    def install(self) -> None:
        """Put this in the place of the head's forward."""
        self._head.forward = self._forward_head  # type: ignore[assignment,method-assign]
        hooks = (
            self._called.register_forward_pre_hook(self._note_labels, with_kwargs=True),
            self._called.register_forward_hook(self._settle_logits),
        )
        self._session.on_undo += [hook.remove for hook in hooks]
        self._session.forwards.trials.append(self._try)

    def _try(self, profile: Callable[[], Any]) -> Any:
        """Profile with deferred logits; again without where the model does more with them than take the loss. Raises
        UsageError where the loss should be smoothed and is not taken of deferred logits."""
        if self._works is not None:
            return profile()
        self._works = True
        try:
            result = profile()
            self._works = None if not self._labelled else not self._untaken
        except Exception:
            result, self._works = None, False
        if self._works is False:
            result = self._profile_whole(profile)
        if self._smoothing and self._labelled and not self._works:
            raise UsageError(_no_smoothing(self._model))
        return result

    def _profile_whole(self, profile: Callable[[], Any]) -> Any:
        try:
            return profile()
        except Exception:  # with whole logits, too: that says nothing of them
            self._works = None
            raise

    def _note_labels(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        needs_loss_alone = not self._keeps_logits() or self._smoothing > 0
        self._labelled = kwargs.get("labels") is not None and needs_loss_alone
        self._untaken = 0

    def _keeps_logits(self) -> bool:
        return self._session.wants_logits and not torch.is_grad_enabled()

    def _forward_head(self, hidden: torch.Tensor) -> Any:
        # An evaluation before any profile: whole logits would do as well, but for a loss that is to be smoothed.
        is_hoped = self._works is None and self._smoothing > 0
        if not (self._labelled and (self._works or is_hoped)):
            return self._wrapped_head(hidden)
        self._untaken += 1
        return DeferredLogits(hidden, self._head.out_features, self._sum_of_losses)

    def _settle_logits(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Without deferred logits, or with what they stand for where that is wanted beside the loss."""
        if isinstance(output, transformers.utils.ModelOutput):
            return type(output)(**{key: self._whole(value) for key, value in output.items() if not self._drops(value)})
        if isinstance(output, tuple):
            return tuple(self._whole(value) for value in output if not self._drops(value))
        return output

    def _drops(self, value: Any) -> bool:
        return isinstance(value, DeferredLogits) and not self._keeps_logits()

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, DeferredLogits):
            return value
        return value.applied(self._wrapped_head(value.hidden))

    def _sum_of_losses(
        self, logits: DeferredLogits, targets: torch.Tensor, ignore_index: int, label_smoothing: float
    ) -> torch.Tensor:
        self._untaken -= 1
        smoothing = self._smoothing or label_smoothing

        def of_hidden(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            scores = logits.applied(apply_head(self._head, self._own_forward, rows))
            if scores.dtype.itemsize < 4:
                scores = scores.float()
            return nn.functional.cross_entropy(
                scores, of, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing
            )

        args = (logits.hidden, targets.to(logits.device))
        piece = self._piece_rows(len(logits.hidden), logits.vocab_size)
        return self._session.call(UnitCall(self._unit, self._path, of_hidden, args, {}, "LOSS", piece))

    def _piece_rows(self, num_rows: int, vocab_size: int) -> int:
        rows = max(_LOGIT_BYTES[self._session.device.kind] // (4 * vocab_size), 1)
        weight = self._head.weight
        is_rounded = weight.requires_grad and weight.dtype.itemsize < 4
        return max(rows, -(-num_rows // _MOST_ROUNDINGS)) if is_rounded else rows


def install_loss(
    model: transformers.PreTrainedModel, called: nn.Module, session: Session, label_smoothing: float
) -> None:
    """Chunk the loss of a model, whose batches `called` is called with, where it has a head that is one product. Raises
    UsageError where smoothing is asked of another."""
    head = model.get_output_embeddings()
    members = ((index, path, module) for index, unit in enumerate(session.units) for path, module in unit.members)
    place = next(((index, path) for index, path, module in members if module is head), None)
    if isinstance(head, nn.Linear) and head._compiled_call_impl is None and place:
        ChunkedLoss(model, called, session, head, place, label_smoothing).install()
    elif label_smoothing:
        raise UsageError(_no_smoothing(model))


def _no_smoothing(model: nn.Module) -> str:
    return f"label smoothing is not for {type(model).__name__}: its loss is not the cross-entropy of its head's logits"
