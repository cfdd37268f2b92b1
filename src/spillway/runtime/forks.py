"""Which calls compute micro-batches beside each other: those that leave nothing behind but what they return."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spillway.model.units import Unit
from spillway.runtime.buffers import BufferGuard
from spillway.runtime.schedules import Schedule


class Forks:
    """A module may keep tensors from call to call (tables of positions, running means), and one micro-batch would read
    them while another makes them. So a call forks only in a forward right after one by the same schedule in which it
    left its modules' tensors as they were."""

    def __init__(self, units: tuple[Unit, ...], buffers: BufferGuard) -> None:
        self._units = units
        self._buffers = buffers
        self._schedule: Schedule | None = None  # of the last forward, where it was whole
        self._now: Schedule | None = None  # of the forward under way
        self._quiet: set[int] = set()  # calls that may fork

    def begin(self, schedule: Schedule) -> None:
        """A forward with gradients begins."""
        if schedule is not self._schedule:
            self._quiet.clear()
        self._schedule, self._now = None, schedule

    def end(self, is_whole: bool) -> None:
        """A forward is over, with gradients where it is whole; others may also have changed what modules keep."""
        self._schedule, self._now = self._now if is_whole else None, None

    @contextmanager
    def forward(self, index: int) -> Iterator[int]:
        """The forward of a call: how many of its micro-batches may be computed at a time."""
        schedule = self._now
        if schedule is None or schedule.plan.placement.streams == 1 or not schedule.profile.calls[index].forks:
            yield 1
            return
        unit = self._units[schedule.profile.calls[index].unit]
        if index in self._quiet and not self._buffers.changes(unit):
            yield schedule.plan.placement.streams
            return
        before = _kept_by(unit)
        yield 1
        after = _kept_by(unit)
        same = (one is other and version == now for (one, version), (other, now) in zip(before, after, strict=False))
        if len(before) == len(after) and all(same):
            self._quiet.add(index)


def _kept_by(unit: Unit) -> list[tuple[torch.Tensor, int]]:
    """Tensors that its modules keep besides parameters, each with the count of its changes."""
    values = (value for _, module in unit.members for part in module.modules() for value in vars(part).values())
    several = (list(value.values()) if isinstance(value, dict) else value for value in values)
    items = (item for value in several for item in (value if isinstance(value, (list, tuple)) else [value]))
    return [
        (item, 0 if item.is_inference() else item._version)
        for item in items
        if isinstance(item, torch.Tensor) and not isinstance(item, torch.nn.Parameter)
    ]
