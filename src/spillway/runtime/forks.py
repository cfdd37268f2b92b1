"""Which calls compute micro-batches beside each other: those that leave nothing behind but what they return."""

from spillway.runtime.buffers import BufferGuard
from spillway.runtime.schedules import Schedule


class Forks:
    """A module may keep tensors from call to call (tables of positions, running means), and one micro-batch would read
    them while another makes them. So a call forks only in a forward right after one by the same schedule in which it
    left what its modules keep as it was."""

    def __init__(self, buffers: BufferGuard) -> None:
        self._buffers = buffers
        self._before: Schedule | None = None  # of the last forward, where it was whole
        self._now: Schedule | None = None  # of the forward under way
        self._again = False  # these are the same

    def begin(self, schedule: Schedule) -> None:
        """A forward with gradients begins."""
        self._again, self._before, self._now = schedule is self._before, None, schedule

    def end(self, is_whole: bool) -> None:
        """A forward is over, with gradients where it is whole; others may also have changed what modules keep."""
        self._before, self._now = self._now if is_whole else None, None

    def streams(self, index: int) -> int:
        """How many micro-batches of a call may be computed at a time in its forward, and then in its backward."""
        schedule = self._now
        if schedule is None or not schedule.profile.calls[index].forks:
            return 1
        return schedule.plan.placement.streams if self._again and self._buffers.is_quiet(index) else 1
