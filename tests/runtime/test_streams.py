"""Micro-batches side by side: nothing that one makes is touched by another before both are over, and the bits stay."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.runtime import window
from spillway.runtime.device import CpuDevice
from spillway.runtime.session import Session

STREAMS = 2


class Watch(TorchDispatchMode):
    """Raises where memory that one micro-batch writes is used by another before the fork is over. What lies in
    `summed` (gradients of weights) is left out: autograd sums it on one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.forks = 0
        self.summed: set[int] = set()
        self._number: int | None = None
        self._users: dict[int, tuple[set[int], set[int]]] = {}  # storage -> micro-batches that read it, that wrote it
        self._made: set[int] = set()
        self._held: list[torch.Tensor] = []  # so that no storage takes the place of another

    @contextmanager
    def fork(self, count: int) -> Iterator[Any]:
        self.forks += count > 1
        assert self._number is None, "a fork within a fork"
        yield lambda number: self.computing(number % count) if count > 1 else nullcontext()
        self._users.clear()
        self._made.clear()
        self._held.clear()

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        self._number = number
        try:
            yield
        finally:
            self._number = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if (
            self._number is not None
            and not func.is_view
            and func is not torch.ops.aten.set_.source_Storage_storage_offset
        ):
            named = [*zip(func._schema.arguments, args, strict=False)]
            named += ((known, kwargs[known.name]) for known in func._schema.arguments if known.name in kwargs)
            for argument, value in named:
                self._note(func, value, bool(argument.is_write))
            given = {address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
            made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            fresh = [tensor for tensor in made if address(tensor) not in given]
            self._made |= {address(tensor) for tensor in fresh}
            self._note(func, fresh, True)
        return found

    def _note(self, func: Any, values: Any, writes: bool) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            if address(tensor) in self.summed:
                continue
            self._held.append(tensor.detach())
            readers, writers = self._users.setdefault(address(tensor), (set(), set()))
            others = (readers | writers if writes else writers) - {self._number}
            # Parts of one tensor that was there before are written by several, each its own rows.
            rows = writes and func is torch.ops.aten.copy_.default and address(tensor) not in self._made
            if others and not rows:
                raise AssertionError(f"{func} of micro-batch {self._number} meets {others}: {tensor.shape}")
            (writers if writes else readers).add(self._number)  # type: ignore[arg-type]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def in_streams(session: Session, index: int) -> int:
    return STREAMS if session.engine.in_force.profile.calls[index].forks else 1


def train(
    name: str, store: Path, activations: str = "recompute", steps: int = 3, device: str = "cpu", **asked: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = models.gpt2(dropout=0.1) if name == "dropout" else models.MODELS[name]()
    model, optimizer = spillway.prepare(
        model, spillway.AdamW(lr=1e-3), store=store, device=device, micro_batch=1, activations=activations, **asked
    )
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        batch = models.batch("gpt2" if name == "dropout" else name, step)
        loss = models.loss_of(model(**{key: value.to(device) for key, value in batch.items()}))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = read_parameters(model)
    close(model)
    return losses, weights


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(CpuDevice, "fork", lambda _, count: found.fork(count))
    collect = window.Gradients.collect

    def collected(self: window.Gradients, name: str, leaf: torch.Tensor) -> None:
        found.summed.add(address(self._slot))
        collect(self, name, leaf)

    monkeypatch.setattr(window.Gradients, "collect", collected)
    return found


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
@pytest.mark.parametrize("name", ("llama", "dropout", "t5", "mixtral", "dit"))
def test_no_micro_batch_touches_what_another_makes_beside_it(
    name: str, activations: str, watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = train(name, tmp_path / "alone", activations)
    assert not watch.forks
    monkeypatch.setattr(Session, "streams", in_streams)
    with watch:
        losses, weights = train(name, tmp_path / "beside", activations)
    assert watch.forks
    assert losses == expected[0]
    assert all(torch.equal(weights[key], value) for key, value in expected[1].items())


def test_the_watch_sees_a_sum_over_micro_batches_that_are_not_over() -> None:
    watch = Watch()
    with watch, watch.fork(2) as beside:
        with beside(0):
            total = torch.ones(3) * 2
        with pytest.raises(AssertionError, match="meets {0}"), beside(1):
            total.add_(torch.ones(3))


class Counts(nn.Module):
    """Each block counts in a buffer what it has seen."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) if buffers else nn.LayerNorm(8) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            rows = norm(rows) + rows
        return rows.square().sum()


@pytest.mark.parametrize("buffers", (False, True))
def test_the_first_forward_and_units_that_change_buffers_compute_one_micro_batch_after_another(
    buffers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fork(self: CpuDevice, count: int) -> AbstractContextManager[Any]:
        asked.append(count)
        return before(self, count)

    before = CpuDevice.fork
    monkeypatch.setattr(CpuDevice, "fork", fork)
    model, optimizer = spillway.prepare(Counts(buffers), spillway.AdamW(lr=1e-3), device="cpu", micro_batch=2)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    session = prepared(model).session
    schedule = session.schedules.of((rows,), {})
    object.__setattr__(schedule.plan.placement, "streams", STREAMS)
    for step in range(2):
        asked.clear()
        model(rows).backward()
        optimizer.step()
        assert set(asked) == ({1} if buffers or not step else {STREAMS})
    close(model)


def test_a_cpu_has_no_streams(tmp_path: Path) -> None:
    with pytest.raises(spillway.UsageError, match="on all its cores"):
        train("llama", tmp_path, streams=2)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
@pytest.mark.parametrize("name", ("llama", "dropout", "t5"))
def test_streams_on_the_gpu_change_no_bit(name: str, activations: str, tmp_path: Path) -> None:
    expected = train(name, tmp_path / "alone", activations, 10, "cuda", streams=1)
    losses, weights = train(name, tmp_path / "beside", activations, 10, "cuda", streams=STREAMS)
    assert losses == expected[0]
    assert all(torch.equal(weights[key], value) for key, value in expected[1].items())
