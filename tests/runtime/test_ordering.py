"""On a GPU a compute operation is over long after its call has returned. No lane touches what it uses before that.

The CPU stands for the GPU here: events remember how far compute had come when they were made, and whoever awaits one
knows that much to be over. Operators of compute and copies, norms and updates of lanes are watched; a lane that touches
memory of compute which it does not know to be over is an error, whatever the timing of this run.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import spillway
from spillway.api import close
from spillway.runtime import lanes
from spillway.runtime.device import CpuDevice
from spillway.runtime.executor import Executor
from spillway.spec.plan import ACTIVATIONS, UPDATE_MODES, Op
from spillway.store.arena import SlabPools


@dataclass(frozen=True)
class Mark:
    """An event: so many operators had been submitted."""

    count: int


@dataclass
class Uses:
    """The last operators of compute that used and wrote a range of memory."""

    used: int = 0
    written: int = 0


class Order(TorchDispatchMode):
    """What compute has submitted, and how much of it each thread knows to be over."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self._submitted = 0
        self._uses: OrderedDict[tuple[int, int], Uses] = OrderedDict()  # the newest last
        self._here = threading.local()
        self._known_at_start = 0  # of the list, by whoever began it
        self._known_after: dict[int, int] = {}  # per operation of the list that is over
        self._known_of_slab: dict[int, int] = {}  # per address, when it was given back
        self._lock = threading.Lock()

    # Compute #

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.is_view:
            return found
        known = func._schema.arguments
        given = [*zip(known, args, strict=False), *((one, kwargs[one.name]) for one in known if one.name in kwargs)]
        with self._lock:
            self._submitted += 1
            for argument, value in given:
                self._note(value, argument.is_write)
            self._note(found, True)
        return found

    def _note(self, values: Any, writes: bool) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and tensor.numel():
                uses = self._uses.setdefault(span(tensor), Uses())
                self._uses.move_to_end(span(tensor))
                uses.used = self._submitted
                if writes:
                    uses.written = self._submitted

    def mark(self) -> Mark:
        return Mark(self._submitted)

    # Who knows what #

    @property
    def known(self) -> int:
        """How many operators this thread knows to be over."""
        return getattr(self._here, "known", 0)

    def learn(self, count: int) -> None:
        self._here.known = max(self.known, count)

    def begin_list(self) -> None:
        self._known_at_start, self._known_after = self.known, {}

    def begin(self, op: Op) -> None:
        self._here.op = op
        with self._lock:
            self.learn(max([self._known_at_start, *(self._known_after.get(dep, 0) for dep in op.deps)]))

    def end(self, op: Op) -> None:
        with self._lock:
            self._known_after[op.id] = self.known

    def give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._known_of_slab[buffer.data_ptr()] = self.known

    def take(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self.learn(self._known_of_slab.get(buffer.data_ptr(), 0))

    def touch(self, tensors: Iterable[torch.Tensor], writes: bool) -> None:
        """By an operation of a lane."""
        with self._lock:
            for begin, end in map(span, tensors):
                for (first, last), uses in reversed(self._uses.items()):
                    if uses.used <= self.known:
                        break
                    if first < end and begin < last and (writes or uses.written > self.known):
                        op = self._here.op
                        self.races.append(f"{op.kind} {op.group} of unit {op.unit}: {uses}, {self.known} are over")


def span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), tensor.data_ptr() + (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Watches the CPU as if it were a GPU. What waits for an event, or knows by another operation, is taken from the
    runtime itself."""
    found = Order()
    acquire, start, finish = Executor._acquire, Executor.start, Executor._finish
    try_take, give = SlabPools.try_take, SlabPools.give
    copy, update_range, sum_squares = CpuDevice.copy, lanes.update_range, lanes.sum_squares

    def started(self: Executor, *given: Any) -> None:
        found.begin_list()
        start(self, *given)

    def acquired(self: Executor, op: Op) -> Any:
        events = acquire(self, op)
        if op.lane != "compute":
            found.begin(op)
        return events

    def finished(self: Executor, op: Op, event: Any, seconds: float) -> None:
        if op.lane != "compute":
            found.end(op)
        finish(self, op, event, seconds)

    def taken(self: SlabPools, op: Op) -> Any:
        events = try_take(self, op)
        for _, lease in op.take if events is not None and op.lane != "compute" else ():
            found.take(self.buffer(lease))
        return events

    def given(self: SlabPools, op: Op, event: Any) -> None:
        for lease in op.give if op.lane != "compute" else ():
            found.give(self.buffer(lease))
        give(self, op, event)

    def copied(self: CpuDevice, lane: str, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        moves = list(moves)
        found.touch([target for target, _ in moves], writes=True)
        found.touch([source for _, source in moves], writes=False)
        copy(self, lane, moves)

    def updated(part: Any, *settings: Any) -> None:
        found.touch(part.stored(), writes=True)
        found.touch([part.grad], writes=False)
        update_range(part, *settings)

    def summed(elements: torch.Tensor, threads: int) -> float:
        found.touch([elements], writes=False)
        return sum_squares(elements, threads)

    monkeypatch.setattr(CpuDevice, "mark", lambda self: found.mark())
    monkeypatch.setattr(CpuDevice, "settle", lambda self, events: [found.learn(event.count) for event in events])
    monkeypatch.setattr(CpuDevice, "seconds_between", lambda self, first, second: found.learn(second.count))
    monkeypatch.setattr(CpuDevice, "copy", copied)
    for name, function in (("start", started), ("_acquire", acquired), ("_finish", finished)):
        monkeypatch.setattr(Executor, name, function)
    monkeypatch.setattr(SlabPools, "try_take", taken)
    monkeypatch.setattr(SlabPools, "give", given)
    monkeypatch.setattr(lanes, "update_range", updated)
    monkeypatch.setattr(lanes, "sum_squares", summed)
    return found


def train(order: Order, store: Path, name: str = "llama", **options: Any) -> None:
    """Steps of two lengths, evaluations between some, and a forward that is given up. The first step, which plans, is
    not watched."""
    model, optimizer = spillway.prepare(
        models.MODELS[name](), spillway.AdamW(lr=1e-3), store=store, device="cpu", micro_batch=2, **options
    )
    for step in range(6):
        with order if step else nullcontext():
            for part in range(options.get("gradient_accumulation_steps", 1)):
                batch = models.batch(name, step + part, length=16 - 4 * (step == 4))
                models.loss_of(model(**batch)).backward()
            optimizer.step()
            if step % 2:
                with torch.no_grad():
                    model(**batch)
            if step == 2:
                model(**batch)
    close(model)


def case(**options: Any) -> Any:
    return pytest.param(options, id="-".join(map(str, options.values())))


ALL = [
    case(update=update, weights=place, states=place, activations=activations)
    for update, place, activations in product(UPDATE_MODES, ("disk", "host", "device"), ACTIVATIONS[1:])
]
# Every update mode, every place and every way to keep activations; the rest runs under -m full.
SAMPLE = [ALL[index] for index in (0, 23, 34, 37, 56)]
OTHERS = [
    case(name="t5", update="overlap", weights="disk", states="host"),
    case(name="mixtral", update="deferred", weights="host", states="disk"),
    case(update="overlap", weights="device", states="disk", gradient_accumulation_steps=2),
    case(update="overlap", weights="device", states="device", gradient_accumulation_steps=2),
    case(policy="deep-optimizer-states"),
]
REST = [pytest.param(*one.values, id=one.id, marks=pytest.mark.full) for one in ALL if one not in SAMPLE]


@pytest.mark.parametrize("options", [*SAMPLE, *OTHERS, *REST])
def test_no_lane_touches_what_compute_may_still_use(options: dict[str, Any], order: Order, tmp_path: Path) -> None:
    train(order, tmp_path, **options)
    assert not order.races, order.races[0]


def forget_events(self: CpuDevice, events: list[Any]) -> None:
    """In place of `settle`."""


def forget_the_list_before(self: SlabPools, event: Any) -> None:
    """In place of `fence`."""


@pytest.mark.parametrize(
    ("owner", "name", "forgetful"),
    ((CpuDevice, "settle", forget_events), (SlabPools, "fence", forget_the_list_before)),
)
def test_the_watch_sees_a_lane_that_does_not_wait(
    owner: Any, name: str, forgetful: Any, order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owner, name, forgetful)
    train(order, tmp_path, update="deferred", weights="disk", states="disk")
    assert order.races
