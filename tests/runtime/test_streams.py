"""Micro-batches side by side: nothing that one makes is touched by another before both are over, and the bits stay."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import spillway
from spillway import planner
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.runtime import engine, window
from spillway.runtime.calls import FlatCall
from spillway.runtime.device import CpuDevice
from spillway.spec.plan import Plan

STREAMS = 2
OUTSIDE = -1  # of every micro-batch, but within the fork


class Watch(TorchDispatchMode):
    """Raises where memory that one micro-batch writes is used by another, or by nobody's, before the fork is over. What
    lies in `summed` (gradients of weights) is left out: autograd sums it in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.forks = 0
        self.summed: set[int] = set()
        self._number: int | None = None
        # Per storage: ranges of bytes, who used them, and whether to write.
        self._uses: dict[int, list[tuple[int, int, int, bool]]] = {}
        self._held: list[torch.Tensor] = []  # so that no storage takes the place of another

    @contextmanager
    def fork(self, count: int) -> Iterator[Any]:
        assert self._number is None, "a fork within a fork"
        if count == 1:
            yield lambda _: nullcontext()
            return
        self.forks += 1
        self._number = OUTSIDE
        yield lambda number: self.computing(number % count)
        self._number = None
        self._uses.clear()
        self._held.clear()

    @contextmanager
    def computing(self, number: int) -> Iterator[None]:
        self._number = number
        try:
            yield
        finally:
            self._number = OUTSIDE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._number is None or func.is_view or func is torch.ops.aten.set_.source_Storage_storage_offset:
            return found
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += ((known, kwargs[known.name]) for known in func._schema.arguments if known.name in kwargs)
        for argument, value in named:
            self._note(func, value, bool(argument.is_write))
        given = {address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self._note(func, [tensor for tensor in made if address(tensor) not in given], True)
        return found

    def _note(self, func: Any, values: Any, writes: bool) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel() or address(tensor) in self.summed:
                continue
            self._held.append(tensor.detach())
            begin = tensor.storage_offset() * tensor.itemsize
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = begin + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
            uses = self._uses.setdefault(address(tensor), [])
            for first, last, number, wrote in uses:
                if number != self._number and (writes or wrote) and first < end and begin < last:
                    raise AssertionError(f"{func} of {self._number} meets {number}: {tensor.shape}")
            uses.append((begin, end, self._number, writes))  # type: ignore[arg-type]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def train(
    name: str, store: Path, activations: str = "recompute", steps: int = 4, device: str = "cpu", **asked: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = models.gpt2(dropout=0.1) if name == "dropout" else models.MODELS[name]()
    model, optimizer = spillway.prepare(
        model, spillway.AdamW(lr=1e-3), store=store, device=device, micro_batch=1, activations=activations, **asked
    )
    torch.manual_seed(1)
    losses = models.train(model, optimizer, "gpt2" if name == "dropout" else name, steps, device)
    weights = read_parameters(model)
    close(model)
    return losses, weights


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with micro-batches side by side, which a CPU would not get."""
    make_plan = planner.make_plan

    def beside(*asked: Any) -> Plan:
        plan = make_plan(*asked)
        return replace(plan, placement=replace(plan.placement, streams=STREAMS))

    monkeypatch.setattr(planner, "make_plan", beside)


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


FORKED, KEEPING = ("llama", "dropout", "t5", "mixtral", "dit"), ("recompute", "tape", "keep")


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "activations"), list(product(FORKED, KEEPING)))
def test_no_micro_batch_touches_what_another_makes_beside_it(
    name: str, activations: str, watch: Watch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    expected = train(name, tmp_path / "alone", activations)
    assert not watch.forks
    request.getfixturevalue("streams")
    with watch:
        losses, weights = train(name, tmp_path / "beside", activations)
    assert watch.forks
    assert losses == expected[0]
    assert all(torch.equal(weights[key], value) for key, value in expected[1].items())


@pytest.mark.parametrize("beside", (1, OUTSIDE))
def test_the_watch_sees_a_sum_over_micro_batches_that_are_not_over(beside: int) -> None:
    watch = Watch()
    with watch, watch.fork(2) as computing:
        with computing(0):
            total = torch.ones(3) * 2
        with pytest.raises(AssertionError, match="meets 0"), nullcontext() if beside == OUTSIDE else computing(beside):
            total.add_(torch.ones(3))


SUMS: list[object] = []  # what sums the gradients of each block's weight, micro-batch by micro-batch


class Keeper(nn.Module):
    """A block that may keep something from call to call: a buffer, a table that is made anew for each length, or a
    count."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mean", torch.zeros(8))
        self.keeps = keeps
        self.tables: dict[int, torch.Tensor] = {}
        self.seen = torch.zeros(())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1]
        if self.keeps == "table" and width not in self.tables:
            self.tables.clear()
            self.tables[width] = torch.ones(width, 1)
        if self.keeps == "count" and not torch.is_grad_enabled():
            self.seen += 1
        if self.keeps == "counts":
            self.seen += 1
        if self.keeps == "buffer":
            self.get_buffer("mean").lerp_(rows.detach().mean((0, 1)), 0.1)
        if self.weight.requires_grad:
            SUMS.append(get_gradient_edge(self.weight).node)
        return self.norm(rows * self.weight) * self.tables.get(width, 1.0)


class Keepers(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeper(keeps) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows) + rows
        return rows.square().sum()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many micro-batches at a time every call was computed with."""
    found: list[int] = []
    fork = CpuDevice.fork
    monkeypatch.setattr(CpuDevice, "fork", lambda self, count: (found.append(count), fork(self, count))[1])
    return found


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    ("keeps", "lengths", "forked"),
    (
        ("nothing", (3, 3, 3), (False, True, True)),
        ("nothing", (3, 5, 3, 3), (False, False, False, True)),
        ("buffer", (3, 3, 3), (False, False, False)),
        ("counts", (3, 3, 3), (False, False, False)),
        ("table", (3, 3, 3, 5, 3, 3, 3), (False, False, True, False, False, False, True)),
        ("nothing", (3, 3, 0, 3, 3), (False, True, False, False, True)),
        ("count", (3, 3, 0, 3, 3), (False, True, False, False, True)),
    ),
)
def test_calls_fork_once_they_leave_nothing_behind(
    keeps: str, lengths: tuple[int, ...], forked: tuple[bool, ...], counts: list[int]
) -> None:
    model, optimizer = spillway.prepare(Keepers(keeps), spillway.AdamW(lr=1e-3), device="cpu", micro_batch=2)
    for length, is_forked in zip(lengths, forked, strict=True):
        if not length:  # an evaluation
            with torch.no_grad():
                model(torch.ones(4, 3, 8))
            continue
        rows = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
        counts.clear()
        model(rows).backward()
        optimizer.step()
        assert (STREAMS in counts) == is_forked, (keeps, lengths, counts)
    close(model)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("activations", ("recompute", "keep"))
def test_gradients_of_a_parameter_are_summed_by_one_node_that_is_let_go_of(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves: list[weakref.ref[torch.Tensor]] = []

    def noted(*asked: Any) -> dict[str, torch.Tensor]:
        views = window.leaves(*asked)
        leaves.extend(map(weakref.ref, views.values()))
        return views

    monkeypatch.setattr(engine, "leaves", noted)
    model, optimizer = spillway.prepare(
        Keepers("nothing"), spillway.AdamW(lr=1e-3), device="cpu", micro_batch=1, activations=activations
    )
    for _ in range(3):
        SUMS.clear()
        leaves.clear()
        model(torch.ones(4, 3, 8)).backward()
        optimizer.step()
    ids = list(map(id, SUMS))
    assert len(ids) == (16 if activations == "recompute" else 8)
    assert all(len(set(ids[start : start + 4])) == 1 for start in range(0, len(ids), 4))
    SUMS.clear()
    prepared(model).session.settle()
    gc.collect()
    assert leaves and all(leaf() is None for leaf in leaves)
    close(model)


def test_a_cpu_has_no_streams(tmp_path: Path) -> None:
    with pytest.raises(spillway.UsageError, match="on all its cores"):
        train("llama", tmp_path, streams=2)


@pytest.mark.gpu
@pytest.mark.sampled(4)
@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
@pytest.mark.parametrize("name", ("llama", "dropout", "t5"))
def test_streams_on_the_gpu_change_no_bit(
    name: str, activations: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = FlatCall.run

    def slow(self: FlatCall, tensors: list[torch.Tensor]) -> Any:
        torch.cuda._sleep(1_000_000)  # what does not wait for it is seen to be wrong
        return call(self, tensors)

    at_rest = {"states": "host"}  # all of them updated by the processor, whatever the plan: a GPU rounds otherwise
    with sdpa_kernel(SDPBackend.MATH):  # other kernels may sum in any order
        expected = train(name, tmp_path / "alone", activations, 10, "cuda", streams=1, **at_rest)
        monkeypatch.setattr(FlatCall, "run", slow)
        losses, weights = train(name, tmp_path / "beside", activations, 10, "cuda", streams=STREAMS, **at_rest)
    assert losses == expected[0]
    assert all(torch.equal(weights[key], value) for key, value in expected[1].items())
