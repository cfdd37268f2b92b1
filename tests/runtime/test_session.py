"""Updates that belong to the next forward come to rest whatever the user does instead of it."""

import copy
import functools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import spillway
from spillway.api import close, read_parameters, save_point
from spillway.assembly import prepared
from spillway.checkpoint import points
from spillway.runtime.lanes import LaneWorker
from spillway.spec.errors import DiskError, UsageError
from spillway.spec.plan import Op
from spillway.store.disk import StripedDisk
from spillway.store.homes import UnitHome

PLACES = ("disk", "host")


def train(
    store: Path, place: str, update: str, between: str = "nothing", steps: int = 3, resume: bool = False
) -> dict[str, torch.Tensor]:
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-3),
        store=store,
        device="cpu",
        update=update,
        weights=place,
        states=place,
        resume=resume,
    )
    for number in range(steps):
        batch = models.batch("llama", number)
        if between == "a forward that is given up":
            model(**models.batch("llama", 50 + number))
        elif between == "a forward that fails":
            with pytest.raises(RuntimeError, match="from a hook"):
                fail_in_third_layer(model, models.batch("llama", 50 + number))
        elif between == "an evaluation":
            with torch.no_grad():
                model(**batch)
        elif between == "a longer batch":
            batch = models.batch("llama", number, length=12 + 4 * number)
        model(**batch).loss.backward()
        optimizer.step()
    weights = read_parameters(model)
    close(model)
    return weights


def fail_in_third_layer(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("from a hook")

    hook = model.get_submodule("model.layers.2").register_forward_pre_hook(fail)
    try:
        model(**batch)
    finally:
        hook.remove()


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "between", ("a forward that is given up", "a forward that fails", "an evaluation", "a longer batch")
)
def test_deferred_updates_are_those_of_serial_ones_whatever_comes_between(
    place: str, between: str, tmp_path: Path
) -> None:
    serial = train(tmp_path / "serial", place, "serial", between)
    assert equal(train(tmp_path / "deferred", place, "deferred", between), serial)


@pytest.mark.parametrize("place", PLACES)
def test_an_evaluation_sees_the_step_before_it(place: str, tmp_path: Path) -> None:
    losses = []
    for update in ("serial", "deferred"):
        model, optimizer = spillway.prepare(
            models.llama(),
            spillway.AdamW(lr=1e-2),
            store=tmp_path / update,
            update=update,
            weights=place,
            states=place,
            device="cpu",
        )
        batch = models.batch("llama", 0)
        model(**batch).loss.backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
        close(model)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("place", PLACES)
def test_a_saved_point_right_after_a_step_is_of_that_step(place: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", place, "deferred", steps=1)
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-3),
        store=tmp_path / "s",
        update="deferred",
        weights=place,
        states=place,
        device="cpu",
    )
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    assert save_point(model) == 1
    close(model)
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path / "s", resume=True, device="cpu"
    )
    assert optimizer.num_steps == 1
    assert equal(read_parameters(model), whole)
    close(model)


CLIPPED = [(0.1, 1), (0.9, 2), (1.0, 1), (1.0, 2), (10.0, 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("weights", "share", "accumulation"), [(place, *clipped) for place in PLACES for clipped in CLIPPED]
)
def test_guessing_that_nothing_is_clipped_gives_the_bits_of_waiting_for_the_norm(
    weights: str, share: float, accumulation: int, tmp_path: Path
) -> None:
    results, limit = [], share * usual_norm(accumulation)
    for update in ("serial", "deferred", "overlap"):
        results.append(run_clipped(tmp_path / update, weights, update, limit, accumulation))
    for found, norms_found in results[1:]:
        assert norms_found == results[0][1]
        assert equal(found, results[0][0])


@functools.cache
def usual_norm(accumulation: int) -> float:
    """Of steps that are not clipped."""
    with tempfile.TemporaryDirectory() as store:
        norms = run_clipped(Path(store), "host", "serial", 1e9, accumulation)[1]
    return sorted(norms)[len(norms) // 2]


def run_clipped(
    store: Path, weights: str, update: str, limit: float, accumulation: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Twelve steps and the norms of their gradients. Every fifth has one backward alone."""
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-3, max_grad_norm=limit),
        store=store,
        update=update,
        weights=weights,
        states="disk",
        device="cpu",
        gradient_accumulation_steps=accumulation,
    )
    norms = []
    for number in range(12):
        count = 1 if number % 5 == 4 else accumulation
        for part in range(1, count + 1):
            with prepared(model).session.rounds.saying(completes=part == count):
                loss = model(**models.batch("llama", number * accumulation + part)).loss / count
                loss.backward()
        optimizer.step()
        norms.append(optimizer.last_result.grad_norm)
    found = read_parameters(model)
    close(model)
    return found, norms


def test_on_disk_every_deferred_step_is_saved_with_the_next_one(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-3),
        store=tmp_path / "s",
        update="deferred",
        weights="disk",
        states="disk",
        device="cpu",
    )
    for number in range(2):
        model(**models.batch("llama", number)).loss.backward()
        optimizer.step()
    assert prepared(model).points.saved_step == 1
    points = prepared(model).points
    close(model)
    assert points.saved_step == 2


class Peeks(nn.Module):
    """A parameter outside any unit that is used first, and a block that is also looked into without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.start
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            seen = self.blocks[3](x)
        return (x - seen).square().mean()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_used_outside_the_list_of_operations_is_up_to_date_too(place: str, tmp_path: Path) -> None:
    results = []
    for update in ("serial", "deferred"):
        torch.manual_seed(0)
        model, optimizer = spillway.prepare(
            Peeks(),
            spillway.AdamW(lr=1e-2),
            store=tmp_path / update,
            update=update,
            weights=place,
            states=place,
            device="cpu",
        )
        losses = []
        for number in range(4):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, read_parameters(model)))
        close(model)
    assert results[0][0] == results[1][0]
    assert equal(results[1][1], results[0][1])


def test_a_gradient_that_is_not_finite_leaves_the_step_before_it_intact(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-3),
        store=tmp_path / "s",
        update="deferred",
        weights="host",
        states="host",
        device="cpu",
    )
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    loss = model(**models.batch("llama", 1)).loss
    (loss * float("inf")).backward()
    with pytest.raises(spillway.NonFinite, match="infinite or not a number"):
        optimizer.step()
    one = train(tmp_path / "one", "host", "serial", steps=1)
    assert equal(read_parameters(model), one)
    with pytest.raises(UsageError):
        optimizer.step()
    close(model)


class PartlyFrozen(nn.Module):
    """Its vectors are padded to whole lines, by as many elements as are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 7) * 0.3, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, :7] @ self.weight.T + self.bias)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PartlyFrozen() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_frozen_parts_of_a_unit_are_fetched_with_a_deferred_update(tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for update in ("serial", "deferred"):
        torch.manual_seed(0)
        model, optimizer = spillway.prepare(
            Stack(),
            spillway.AdamW(lr=1e-2),
            store=tmp_path / update,
            update=update,
            weights="disk",
            states="disk",
            device="cpu",
        )
        for number in range(4):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
            loss.backward()
            optimizer.step()
            losses.setdefault(update, []).append(loss.item())
        close(model)
    assert losses["deferred"] == losses["serial"]


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """From now on every write takes so many seconds more."""
    write_all = StripedDisk.write_all

    def slow_down(seconds: float) -> None:
        def slowly(self: StripedDisk, *args: Any) -> None:
            time.sleep(seconds)
            write_all(self, *args)

        monkeypatch.setattr(StripedDisk, "write_all", slowly)

    return slow_down


def on_disk(store: Path, update: str, limit: float = 1e9) -> tuple[nn.Module, Any]:
    return spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-2, max_grad_norm=limit),
        store=store,
        device="cpu",
        update=update,
        weights="disk",
        states="disk",
    )


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    model(**models.batch("llama", number)).loss.backward()
    optimizer.step()


def test_an_evaluation_between_forward_and_backward_sees_the_weights_of_that_forward(
    tmp_path: Path, slow_writes: Callable[[float], None]
) -> None:
    model, optimizer = on_disk(tmp_path, "deferred")
    slow_writes(0.03)
    step(model, optimizer)
    loss = model(**models.batch("llama", 0)).loss
    with torch.no_grad():
        seen = model(**models.batch("llama", 0)).loss
    assert seen.item() == loss.item()
    loss.backward()
    optimizer.step()
    close(model)


def test_an_interrupt_while_updates_come_to_rest_leaves_a_model_that_closes(
    tmp_path: Path, slow_writes: Callable[[float], None]
) -> None:
    model, optimizer = on_disk(tmp_path, "deferred")
    step(model, optimizer)
    slow_writes(0.2)
    model(**models.batch("llama", 1)).loss.backward()
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    points = prepared(model).points
    close(model)
    assert points.saved_step == 2, "the step was over before the interrupt was raised"


def test_a_drive_that_fails_between_backward_and_step_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = on_disk(tmp_path, "deferred")
    step(model, optimizer)

    def fail(self: StripedDisk) -> None:
        time.sleep(1)  # until backward is over
        raise DiskError("the drive is gone")

    monkeypatch.setattr(StripedDisk, "sync", fail)
    model(**models.batch("llama", 1)).loss.backward()
    with pytest.raises(DiskError, match="the drive is gone"):
        read_parameters(model)
    with pytest.raises((DiskError, UsageError)):
        optimizer.step()
    with pytest.raises(UsageError, match="last saved point"):
        read_parameters(model)
    close(model)


@pytest.mark.parametrize("delay", (0.0, 0.2))
def test_a_guess_that_may_be_taken_back_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    model, optimizer = on_disk(tmp_path, "overlap")
    for number in range(5):
        step(model, optimizer, number)
    read = LaneWorker._read_state

    def read_late(self: LaneWorker, *of: Any) -> None:
        time.sleep(delay)  # so that no update has run when backward returns
        read(self, *of)

    monkeypatch.setattr(LaneWorker, "_read_state", read_late)
    model(**models.batch("llama", 6)).loss.backward()
    with pytest.raises(UsageError, match=r"call optimizer.step\(\) first"):
        read_parameters(model)
    optimizer.step()
    assert read_parameters(model)
    close(model)


def test_a_step_for_which_there_is_no_room_leaves_weights_in_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(lr=1e-2, max_grad_norm=1e9), store=tmp_path, update="overlap", weights="host",
        states="disk", device="cpu",
    )  # fmt: skip
    for number in range(5):
        step(model, optimizer, number)

    def fail(*_: object) -> None:
        raise DiskError("the manifest cannot be written")

    with monkeypatch.context() as patched:
        patched.setattr(points, "save_manifest", fail)
        with pytest.raises(DiskError, match="manifest"):
            step(model, optimizer, 5)
    before = read_parameters(model)
    with pytest.raises(DiskError, match="no room"):
        step(model, optimizer, 6)
    assert equal(read_parameters(model), before)
    close(model)


@pytest.mark.parametrize(
    ("left", "helps", "least", "most"),
    [(1.1, True, 0.0, 0.0), (0.9, True, 0.1, 1.0), (0.0, True, 1.0, 1.0), (0.0, False, 0.0, 0.0)],
)
def test_the_heap_is_given_back_before_what_would_pass_the_peak(
    left: float, helps: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`left`: of what the largest call takes."""
    trims: list[int] = []
    model, optimizer = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-3), device="cpu")
    step(model, optimizer, 0)
    schedule = prepared(model).session.engine.in_force
    plan = schedule.plan
    taken = plan.peaks.host - int(left * max(call.work_bytes for call in schedule.profile.calls))
    given_back = [taken // 2] if helps else [taken]

    def process_bytes() -> int:  # asked before each call, and after what is free was given back
        is_after, given_back[1:] = len(given_back) > 1, []
        return given_back[0] if is_after else taken

    def trim() -> None:
        trims.append(1)
        given_back.append(0)

    monkeypatch.setattr("spillway.runtime.device.process_bytes", process_bytes)
    monkeypatch.setattr("spillway.runtime.device.trim_heap", trim)
    step(model, optimizer, 1)
    close(model)
    if not helps:
        assert len(trims) == 1, "what gave nothing back is not tried again"
        return
    calls = sum(op.lane == "compute" and op.call >= 0 for op in plan.ops)
    assert least * calls <= len(trims) <= most * calls


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep"))
def test_backward_may_run_in_a_thread_of_its_own(activations: str, tmp_path: Path) -> None:
    """As autograd's does on a GPU: what a thread has set, autocast among it, is the forward's."""

    def losses(store: Path, backward: Callable[[torch.Tensor], None]) -> list[float]:
        model, optimizer = spillway.prepare(
            models.gpt2(dropout=0.1), spillway.AdamW(lr=1e-3), store=store, device="cpu", activations=activations
        )
        torch.manual_seed(3)
        found = []
        for number in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = models.loss_of(model(**models.batch("gpt2", number)))
            backward(loss)
            optimizer.step()
            found.append(loss.item())
        close(model)
        return found

    def apart(loss: torch.Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert losses(tmp_path / "apart", apart) == losses(tmp_path / "here", torch.Tensor.backward)


@pytest.mark.parametrize(("place", "is_lost"), (("disk", False), ("host", True)))
def test_updates_that_a_passing_fault_has_stopped_are_made_again_where_nothing_was_changed(
    place: str, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step that counts as done, which the next forward, or whoever looks, carries out."""

    def trained(store: Path, faults: int) -> dict[str, torch.Tensor]:
        model, optimizer = spillway.prepare(
            models.llama(), spillway.AdamW(lr=1e-2), store=store, device="cpu", update="deferred", weights="disk",
            states="disk" if place == "disk" else "host",
        )  # fmt: skip
        write, left = LaneWorker._write_state, 0

        def fail(self: LaneWorker, op: Op, home: UnitHome) -> None:
            nonlocal left
            if left and op.unit == 2:
                left -= 1
                raise DiskError("the drive is gone for a moment")
            write(self, op, home)

        monkeypatch.setattr(LaneWorker, "_write_state", fail)
        for number in range(3):
            step(model, optimizer, number)
            left = faults
            for _ in range(faults):
                with pytest.raises(DiskError, match="for a moment"):
                    read_parameters(model)
        monkeypatch.setattr(LaneWorker, "_write_state", write)
        found = read_parameters(model)
        close(model)
        return found

    expected = trained(tmp_path / "whole", 0)
    if is_lost:
        with pytest.raises(UsageError, match="last saved point"):
            trained(tmp_path / "faulty", 1)
    else:
        assert equal(trained(tmp_path / "faulty", 2), expected)


def test_a_device_that_fails_while_a_model_is_closed_leaves_no_lanes_and_no_locks(tmp_path: Path) -> None:
    model, optimizer = on_disk(tmp_path, "serial")
    step(model, optimizer)

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    prepared(model).session.device.mark = fail  # type: ignore[method-assign,assignment]
    lanes = prepared(model).session.engine.executor._threads
    with pytest.raises(RuntimeError, match="illegal memory access"):
        close(model)
    assert lanes and not any(lane.is_alive() for lane in lanes)
    again, _ = spillway.prepare(models.llama(), store=tmp_path, device="cpu", resume=True)
    read_parameters(again)
    close(again)


class AsksItself(nn.Module):
    """Its forward looks at what it would say itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor, inner: bool = False) -> torch.Tensor:
        if not inner:
            with torch.no_grad():
                x = x + self(x, inner=True)
        for layer in self.layers:
            x = layer(x)
        if self.fails and not inner:
            raise ArithmeticError
        return x


def test_a_forward_that_failed_after_it_called_itself_was_no_forward() -> None:
    plain = AsksItself()
    model, optimizer = spillway.prepare(copy.deepcopy(plain), device="cpu", gradient_accumulation_steps=2)
    x = torch.randn(4, 8)
    loss = model(x).square().sum()
    assert torch.equal(loss, plain(x).square().sum())
    loss.backward()
    model.fails = True  # type: ignore[assignment]
    with pytest.raises(ArithmeticError):
        model(x)
    optimizer.zero_grad()
    close(model)
