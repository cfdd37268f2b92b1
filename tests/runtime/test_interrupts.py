"""Ctrl-C: what it ends, and that training goes on from there."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import spillway
from spillway.api import close, read_parameters, save_point
from spillway.assembly import prepared
from spillway.runtime import session as session_module
from spillway.runtime.executor import Executor
from spillway.runtime.interrupts import uninterrupted
from spillway.runtime.lanes import LaneWorker


@pytest.fixture(autouse=True)
def handler_of_python() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def make(store: Path, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = models.llama()
    return spillway.prepare(model, spillway.AdamW(lr=1e-2), store=store, device="cpu", **options)


def train(model: nn.Module, optimizer: Any, until: int) -> None:
    while optimizer.num_steps < until:
        model(**models.batch("llama", optimizer.num_steps)).loss.backward()
        optimizer.step()


def loss_without_gradients(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(**models.batch("llama", 9)).loss)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What four steps give."""
    model, optimizer = make(tmp_path_factory.mktemp("whole"))
    train(model, optimizer, 4)
    found = read_parameters(model)
    close(model)
    return found


def test_it_is_raised_when_what_is_under_way_is_over() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        interrupt()
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_is_raised_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        interrupt()
        done.append(1)
        interrupt()
        done.append(2)
    assert done == [1]


def test_other_handlers_are_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with uninterrupted():
        interrupt()
        assert heard == [signal.SIGINT]


@pytest.mark.parametrize("place", ("disk", "host"))
@pytest.mark.parametrize("update", ("deferred", "serial"))
def test_no_update_is_lost(
    place: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    """In an evaluation, which carries out the last step's updates, or in the step itself."""
    model, optimizer = make(tmp_path, weights=place, states=place, update=update)
    train(model, optimizer, 2)
    waits, update_whole, join = threading.Event(), LaneWorker._update, Executor.join

    def interrupted(self: LaneWorker, *given: Any) -> None:
        monkeypatch.setattr(LaneWorker, "_update", update_whole)
        assert waits.wait(30)
        interrupt()
        update_whole(self, *given)

    def told_join(self: Executor) -> None:
        waits.set()
        join(self)

    if update == "deferred":
        model(**models.batch("llama", 2)).loss.backward()
        optimizer.step()
    monkeypatch.setattr(LaneWorker, "_update", interrupted)
    monkeypatch.setattr(Executor, "join", told_join)
    if update == "serial":
        model(**models.batch("llama", 2)).loss.backward()
    with pytest.raises(KeyboardInterrupt):
        loss_without_gradients(model) if update == "deferred" else optimizer.step()
    assert optimizer.num_steps == save_point(model) == 3
    train(model, optimizer, 4)
    found = read_parameters(model)
    close(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("place", ("disk", "host"))
def test_an_evaluation_after_a_forward_that_was_interrupted(place: str, tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, weights=place, states=place, update="deferred")
    train(model, optimizer, 2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.get_submodule("model.layers.0").register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(**models.batch("llama", 2))
    hook.remove()
    assert loss_without_gradients(model) == loss_without_gradients(model)
    train(model, optimizer, 3)
    close(model)


def test_a_step_that_ends_as_it_begins_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    model, optimizer = make(tmp_path, weights="disk", states="disk")
    train(model, optimizer, 2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(session_module, "Activations", stop)
        model(**models.batch("llama", 2))
    train(model, optimizer, 4)
    found = read_parameters(model)
    close(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_plan_that_finds_no_room_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(tmp_path, weights="host", states="host", update="deferred")
    train(model, optimizer, 2)
    store = prepared(model).session.store
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(store, "lay_slabs", no_room)
        model(**models.batch("llama", 0, length=24))
    assert loss_without_gradients(model) > 0, "updates are due, and are made by the plan before"
    train(model, optimizer, 3)
    close(model)


def no_room(*_: object) -> None:
    raise MemoryError
