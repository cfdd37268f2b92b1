"""Runs a list of operations: one thread per lane, in list order, each operation as soon as its dependencies are done
and its leases are granted. The compute lane is the caller's own thread. Nothing here knows what comes next: the list
does."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from spillway.runtime.device import Device
from spillway.spec.errors import invariant
from spillway.spec.plan import LANES, Op
from spillway.spec.trace import Span, Trace
from spillway.store.arena import SlabPools

# Carries out an operation on its lane.
Handler = Callable[[Op], None]

_THREAD_LANES = LANES[1:]


@dataclass(frozen=True, slots=True)
class Begun:
    """The start of a compute operation: seconds since the list began, and an event."""

    seconds: float
    mark: object


class Executor:
    """Executes one list at a time. Thread-safe where the lanes and the caller meet."""

    def __init__(self, device: Device, handler: Handler) -> None:
        self._device = device
        self._handler = handler
        self._changed = threading.Condition()
        self._ops: tuple[Op, ...] = ()
        self._pools: SlabPools | None = None
        self._done: list[bool] = []
        self._events: dict[int, object] = {}
        self._marks: dict[int, tuple[object, object]] = {}  # around the work of compute operations on the device
        self._first_mark: object = None
        self._compute: list[Op] = []
        self._next_compute = 0
        self._running = 0
        self._list_number = 0
        self._error: BaseException | None = None
        self._told = False  # of the error
        self._abandoned = True
        self._closed = False
        self._spans: list[Span] = []
        self._started = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"spillway-{lane}", daemon=True)
            for lane in _THREAD_LANES
        ]
        for thread in self._threads:
            thread.start()
        # A lane that is within an operator when the interpreter ends would take the process down with SIGABRT.
        self._process = os.getpid()
        atexit.register(self._close_at_exit)

    # The caller's side #

    def start(
        self, ops: tuple[Op, ...], pools: SlabPools, finds: Collection[str] = (), keeps: Collection[str] = ()
    ) -> None:
        """Begin a list; the one before must be finished or abandoned. `finds` and `keeps`: leases that it begins with
        and that it leaves to the next."""
        with self._changed:
            invariant(self.idle, "a step began before the last one was over")
            pools.start(ops, finds, keeps)
            self._pools = pools
            self._ops = ops
            self._done = [False] * len(ops)
            self._events, self._marks = {}, {}
            self._first_mark = self._device.mark()
            self._compute = [op for op in ops if op.lane == "compute"]
            self._next_compute = 0
            self._error = None
            self._told = False
            self._abandoned = False
            self._spans = []
            self._started = time.perf_counter()
            self._list_number += 1
            self._running = len(_THREAD_LANES)
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether no list is under way."""
        return self._running == 0 and self._next_compute == len(self._compute)

    def runs(self, ops: tuple[Op, ...]) -> bool:
        """Whether this is the list under way, or the last one."""
        return self._ops is ops

    def late_commit(self) -> Op | None:
        """The COMMIT of the step before, where that is in this list."""
        return next((op for op in self._ops if op.kind == "COMMIT" and op.late), None)

    @property
    def seconds(self) -> float:
        """Since the list began."""
        return time.perf_counter() - self._started

    def upcoming_compute(self) -> Op | None:
        """The compute operation the list has next."""
        with self._changed:
            return self._compute[self._next_compute] if self._next_compute < len(self._compute) else None

    def begin_compute(self, op: Op) -> "Begun":
        """Wait until the next compute operation may run, with its leases; the answer is for `end_compute`."""
        with self._changed:
            self._raise_failure()
            invariant(self._compute[self._next_compute] is op, f"{op.kind} of call {op.call} is not next on its lane")
            events = self._acquire(op)
            self._raise_failure()
            invariant(events is not None, "the step was given up while it was computing")
        self._device.wait(events or [])
        return Begun(self.seconds, self._device.mark())

    def end_compute(self, op: Op, begun: "Begun") -> None:
        """Mark the operation done; its leases carry the event that ends its work on the device."""
        event = self._device.mark()
        self._marks[op.id] = (begun.mark, event)
        self._finish(op, event, begun.seconds)
        self._next_compute += 1

    def skip_compute(self, op: Op) -> None:
        """Pass over an operation whose computation is not needed."""
        start = self.begin_compute(op)
        self.end_compute(op, start)

    def join(self) -> None:
        """Return when every lane is done. Raises what one raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)
            self._raise_failure()

    def wait(self) -> Trace:
        """Return when every lane is done, and compute on the device, too, with what ran when. Raises what a lane
        raised."""
        self.join()
        spans = tuple(map(self._by_device, self._spans))
        return Trace(spans, max((span.end_s for span in spans), default=0.0))

    def _by_device(self, span: Span) -> Span:
        """When compute was really done: its call may return as soon as it is submitted."""
        if span.op not in self._marks:
            return span
        start, end = self._marks[span.op]
        begin = self._device.seconds_between(self._first_mark, start)
        length = self._device.seconds_between(start, end)
        return span if begin is None or length is None else replace(span, start_s=begin, end_s=begin + length)

    @property
    def has_failed(self) -> bool:
        """Whether an operation of this list raised."""
        return self._error is not None

    def run_out(self, last: Op) -> None:
        """Return when the list has run up to `last`, or was given up, without computing anything: so that what the
        user's forward does not go on with still comes to rest. Raises what a lane raised."""
        while (op := self.upcoming_compute()) is not None and op.id < last.id:
            self.skip_compute(op)
        with self._changed:
            self._changed.wait_for(lambda: self._done[last.id] or self._abandoned)
            self._raise_failure()

    def raise_untold(self) -> None:
        """Raise what a lane raised, unless somebody was told before."""
        with self._changed:
            if not self._told:
                self._raise_failure()

    def come_to_rest(self) -> None:
        """Return when no lane works on the list any more, whether it succeeded or failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def abandon(self) -> None:
        """Give the list up: lanes finish the operation they are in, leases come back."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running == 0)
            self._next_compute = len(self._compute)
            if self._pools is not None:
                self._pools.abandon(self._device.mark())

    def forget_pools(self) -> None:
        """Let go of the slabs of the last list."""
        invariant(self.idle, "slabs are taken away within a step")
        self._pools = None

    def close(self) -> None:
        """End the lanes."""
        atexit.unregister(self._close_at_exit)
        try:
            self.abandon()  # may find that the device has failed
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process:  # a fork has no lanes to wait for
            self.close()

    # The lanes' side #

    def _work(self, lane: str) -> None:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._closed or self._list_number != seen)  # type: ignore[misc]
                if self._closed:
                    return
                seen = self._list_number
                ops = [op for op in self._ops if op.lane == lane]
            try:
                for op in ops:
                    if not self._carry_out(op):
                        break
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _carry_out(self, op: Op) -> bool:
        try:
            with self._changed:
                events = self._acquire(op)
            if events is None:
                return False
            self._device.settle(events)
            start = self.seconds
            self._handler(op)
            self._finish(op, None, start)
            return True
        except BaseException as error:
            with self._changed:
                if self._error is None:
                    self._error = error
                self._abandoned = True
                self._changed.notify_all()
            return False

    def _acquire(self, op: Op) -> list[object] | None:
        """Wait (holding the lock) for dependencies and leases; None when the list was given up."""
        granted: list[object] | None = None

        def ready() -> bool:
            nonlocal granted
            if self._abandoned:
                return True
            if not all(self._done[dep] for dep in op.deps) or self._pools is None:
                return False
            granted = self._pools.try_take(op)
            return granted is not None

        self._changed.wait_for(ready)
        if self._abandoned or granted is None:
            return None
        return granted + [self._events[dep] for dep in op.deps if self._events.get(dep) is not None]

    def _finish(self, op: Op, event: object, start: float) -> None:
        with self._changed:
            if self._done[op.id]:
                return  # an interrupt came between this and the count of operations
            if self._pools is not None:
                self._pools.give(op, event)
            self._done[op.id] = True
            if event is not None:
                self._events[op.id] = event
            self._spans.append(Span(op.id, op.kind, op.lane, op.unit, op.group, start, self.seconds, op.amount))
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error
