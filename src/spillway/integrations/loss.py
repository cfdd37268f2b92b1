"""The head and the loss of a transformers model in one: logits are never whole in memory."""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from spillway.integrations.head import apply_head
from spillway.integrations.logits import DeferredLogits, ModelCall, apply_steps
from spillway.model.profile import UnitCall
from spillway.runtime.calls import autocast_of
from spillway.runtime.session import Session
from spillway.runtime.unit import is_streamed, original_forward
from spillway.runtime.within import num_calls
from spillway.spec.errors import UsageError

# Logits of one piece of the loss, in float32: where a GPU computes, larger ones, for every piece reads the head anew.
_LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
# The gradient of a 16-bit head is rounded once per piece. Up to so many the error is about a hundredth and has no
# direction; beyond, what one piece adds is lost beside the sum of the others.
_MOST_ROUNDINGS = 64


class _NotInPieces(Exception):
    """Of a forward that is looked at. (No TypeError: operators of tensors keep that to themselves.)"""


class ChunkedLoss:
    """The head and the cross-entropy as one unit call, a piece of the tokens at a time.

    In a forward with labels the head gives DeferredLogits, and torch.nn.functional.cross_entropy, by whatever loss of
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
        self._names = tuple(inspect.signature(called.forward).parameters)
        self._calls: list[ModelCall] = []  # a model may call itself
        self._defers = False  # in the forward that is profiled
        self._never = False  # for the model does more with its logits
        # Of that forward: logits whose loss was taken, those of which it was not, and whether more was asked of any.
        self._taken, self._untaken, self._asked_more = 0, 0, False

    def install(self) -> None:
        """Put this in the place of the head's forward."""
        self._head.forward = self._forward_head  # type: ignore[method-assign]
        hooks = (
            self._called.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            self._called.register_forward_hook(self._end, prepend=True, always_call=True),
        )
        self._session.on_undo += [hook.remove for hook in hooks]
        self._session.forwards.trials.append(self._try)
        self._session.forwards.on_begin.append(self._count_anew)

    def _count_anew(self) -> None:
        self._taken, self._untaken, self._asked_more = 0, 0, False

    def _try(self, profile: Callable[[], Any]) -> Any:
        """Profile with deferred logits; again without where the model does more with them than take the loss. Raises
        UsageError where the loss should be smoothed and is not taken of deferred logits."""
        self._defers = not self._never
        try:
            result = profile()
        except Exception:
            if not self._defers:
                raise
            self._asked_more = True
        if self._asked_more or self._untaken > 0:
            self._defers = False
            result = profile()  # an error with whole logits, too, says nothing of them
            self._give_up()
        if self._smoothing and not self._taken:
            raise UsageError(_no_smoothing(self._model))
        return result

    def _give_up(self) -> None:
        """Keep logits whole from now on, also in plans that were made."""
        self._never = True
        self._session.schedules.drop_all()

    # A forward of the model #

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # which the session refuses
        del self._calls[num_calls(self._called) - 1 :]  # those that Ctrl-C ended
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        has_grad = torch.is_grad_enabled()
        needs_loss_alone = has_grad or not self._session.wants_logits or self._smoothing > 0
        labelled = given.get("labels") is not None
        self._calls.append(ModelCall(labelled and needs_loss_alone, has_grad, given.get("num_items_in_batch")))

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Without deferred logits, or with what they stand for where that is wanted beside the loss."""
        if torch.compiler.is_compiling():
            return output
        call = self._calls.pop() if len(self._calls) == num_calls(self._called) else None
        if call is not None:  # nothing, where another hook failed before it began
            self._refuse_unsmoothed(call, output)
            output = self._without_deferred(output)
            call.is_over = True
        return output

    def _refuse_unsmoothed(self, call: ModelCall, output: Any) -> None:
        """Raise UsageError for a loss that should be smoothed and was not (`output`: None where the forward failed)."""
        is_profiled = self._session.forwards.is_profiling  # which is tried in both ways
        if self._smoothing and call.needs_loss_alone and not call.has_loss and output is not None and not is_profiled:
            raise UsageError(_no_smoothing(self._model))

    def _without_deferred(self, output: Any) -> Any:
        if not isinstance(output, transformers.utils.ModelOutput):
            return self._settled(output) if _has_deferred(output) else output
        for key, value in list(output.items()):
            if not _has_deferred(value):
                continue
            settled = self._settled(value)
            if settled is None:
                OrderedDict.__delitem__(output, key)
                object.__setattr__(output, key, None)
            else:
                output[key] = settled
        return output

    def _settled(self, value: Any) -> Any:
        keeps = self._session.wants_logits and not torch.is_grad_enabled()
        return tree_map_only(DeferredLogits, lambda logits: self.whole(logits, "return") if keeps else None, value)

    def _forward_head(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        if not is_plain or not self._may_defer():
            return self._wrapped_head(*args, **kwargs)
        self._untaken += 1
        return DeferredLogits(args[0], self._head.out_features, self, autocast_of(args[0].device), self._calls[-1])

    def _may_defer(self) -> bool:
        del self._calls[num_calls(self._called) :]
        call = self._calls[-1] if self._calls else None
        if call is None or not call.needs_loss_alone or call.has_grad != torch.is_grad_enabled():
            return False
        if self._session.forwards.is_profiling:
            return self._defers and not self._has_hooks
        if not call.has_grad or self._unit in self._session.forwards.residents:
            return not self._never and not self._has_hooks
        is_planned = self._session.plans_loss(self._unit)
        if is_planned and self._has_hooks:
            self._refuse_more("a hook of the head")
        return is_planned

    @property
    def _has_hooks(self) -> bool:
        """Which want logits."""
        head = self._head
        return bool(head._forward_hooks or head._backward_hooks or head._backward_pre_hooks)

    # What deferred logits ask for #

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole(self, logits: DeferredLogits, wanted: str) -> torch.Tensor:
        """See Owner. Raises UsageError in a step, which has no room for them, and when the forward is over."""
        self._refuse_over(logits, wanted)
        if self._session.forwards.is_profiling:
            self._asked_more = True
            raise _NotInPieces(wanted)
        if torch.is_grad_enabled():
            self._refuse_more(wanted)
        return logits.applied(self._wrapped_head(logits.hidden))

    def _refuse_more(self, wanted: str) -> NoReturn:
        self._give_up()
        raise UsageError(
            f"{type(self._model).__name__} does more with its logits ({wanted}) than when a batch of this shape was "
            f"planned, where they were never whole: from the next batch on they are; this one is lost"
        )

    def _refuse_over(self, logits: DeferredLogits, wanted: str) -> None:
        if logits.call.is_over:
            raise UsageError(
                f"logits of a forward of {type(self._model).__name__} with labels were kept and are used now "
                f"({wanted}): they were never computed; call the model without labels to have them"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def loss(
        self, logits: DeferredLogits, targets: torch.Tensor, ignore_index: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        """See Owner."""
        self._refuse_over(logits, "cross_entropy")
        logits.call.has_loss = True
        self._taken, self._untaken = self._taken + 1, self._untaken - 1
        smoothing = self._smoothing or smoothing
        steps, autocast = logits.steps, logits.autocast  # and not the hidden states, which may be moved meanwhile

        def of_hidden(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            with autocast():
                scores = apply_head(self._head, self._own_forward, rows)
            scores = apply_steps(steps, scores)
            if scores.dtype.itemsize < 4:
                scores = scores.float()
            return nn.functional.cross_entropy(
                scores, of, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing
            )

        args = (logits.hidden, targets.to(logits.device))
        piece = self._piece_rows(len(logits.hidden), logits.vocab_size)
        total: torch.Tensor = self._session.call(UnitCall(self._unit, self._path, of_hidden, args, {}, "LOSS", piece))
        if reduction == "sum":
            return total
        # What smooths labels in transformers divides by that, whatever the model's own loss does.
        items = logits.call.num_items if self._smoothing else None
        return total / ((targets != ignore_index).sum() if items is None else items)

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
    # Two models may have one head: the loss of the first one has it then.
    if isinstance(head, nn.Linear) and head._compiled_call_impl is None and place and is_streamed(head):
        ChunkedLoss(model, called, session, head, place, label_smoothing).install()
    elif label_smoothing:
        raise UsageError(_no_smoothing(model))


def _has_deferred(value: Any) -> bool:
    return any(isinstance(leaf, DeferredLogits) for leaf in tree_leaves(value))


def _no_smoothing(model: nn.Module) -> str:
    return f"label smoothing is not for {type(model).__name__}: its loss is not the cross-entropy of its head's logits"
