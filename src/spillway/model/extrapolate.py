"""The calls of a forward on a whole batch, told from those on a few of its rows."""

from dataclasses import replace

import torch

from spillway.model.layouts import order_of
from spillway.model.profile import CallRecord, CallShape
from spillway.model.work import Work
from spillway.spec.errors import UsageError
from spillway.spec.model import OperatorClass


def of_rows(few: list[CallRecord], one_more: list[CallRecord], have: int, rows: int) -> list[CallRecord]:
    """What a forward on `rows` rows calls, from one on `have` rows and one on a row more: every dimension grows by as
    much with each row, and what a call costs is proportional to the rows. Its tensors have no content. Raises
    UsageError where the two forwards do not call the same."""
    if [(call.unit, call.member, call.kind) for call in few] != [(c.unit, c.member, c.kind) for c in one_more]:
        raise UsageError(
            "the forward calls other modules for other rows of a batch, so it cannot be cut into micro-batches: leave "
            "micro_batch out"
        )
    known: dict[int, torch.Tensor] = {}
    return [_of_rows(*pair, have, rows, known) for pair in zip(few, one_more, strict=True)]


def _of_rows(few: CallRecord, one_more: CallRecord, have: int, rows: int, known: dict[int, torch.Tensor]) -> CallRecord:
    def all_of(tensors: dict[int, torch.Tensor], grown: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        for place, tensor in tensors.items():
            if id(tensor) not in known:  # one that several calls share is shared again
                sizes = zip(tensor.shape, grown[place].shape, strict=True)
                size = [have_size + (more - have_size) * (rows - have) for have_size, more in sizes]
                known[id(tensor)] = torch.empty_permuted(size, order_of(tensor), dtype=tensor.dtype, device="meta")
                known[id(tensor)].requires_grad_(tensor.requires_grad)
        return {place: known[id(tensor)] for place, tensor in tensors.items()}

    times = rows / have
    return replace(
        few,
        inputs=all_of(few.inputs, one_more.inputs),
        outputs=all_of(few.outputs, one_more.outputs),
        flops=few.flops * times,
        saved_bytes=round(few.saved_bytes * times),
        operators=tuple(_of_class(operator, times) for operator in few.operators),
        rows=few.rows + (one_more.rows - few.rows) * (rows - have),
        mixes_rows=few.mixes_rows or one_more.mixes_rows or few.plain != one_more.plain,
    )


def _of_class(operator: OperatorClass, times: float) -> OperatorClass:
    return replace(operator, flops=operator.flops * times, num_bytes=round(operator.num_bytes * times))


def with_works(calls: list[CallRecord], shapes: tuple[CallShape, ...], have: int, rows: int) -> list[CallRecord]:
    """Calls whose work was measured on `have` rows, as many as a micro-batch has: those that are not cut take more."""
    return [
        replace(call, work=_times(call.work, rows / have)) if call.kind == "FORWARD" and shape.chunks == 1 else call
        for call, shape in zip(calls, shapes, strict=True)
    ]


def _times(work: Work | None, times: float) -> Work | None:
    return None if work is None else Work(round(work.peak * times), round(work.heap * times))
