"""States that are read in backward for the updates of the next forward: nothing but the time of reading changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import ahead
import models
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.native import Batch, DiskEngine
from spillway.spec.errors import SkippedStep


class Run:
    """Steps of a small Llama whose updates are all made in the next forward: always, or where gradients are clipped."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.model, self.optimizer = spillway.prepare(
            models.llama(),
            spillway.AdamW(lr=1e-2, max_grad_norm=1e-2),
            store=store,
            device="cpu",
            **{"states": "disk", "weights": "disk", "update": "deferred", **options},
        )
        self.session = prepared(self.model).session

    def step(self, number: int, scale: float = 1.0, **changed: torch.Tensor) -> float:
        loss = scale * self.model(**{**models.batch("llama", number), **changed}).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    @property
    def found_all(self) -> bool:
        """Whether the last step began with states that the one before had read."""
        plan = self.session.engine.in_force.plan
        return bool(plan.kept) and self.session.engine.executor.runs(plan.warm_ops)

    def end(self) -> dict[str, torch.Tensor]:
        found = read_parameters(self.model)
        close(self.model)
        return found


@pytest.mark.parametrize(("weights", "update"), [("disk", "deferred"), ("host", "deferred"), ("disk", "overlap")])
def test_whatever_comes_between_steps_they_are_the_same(
    weights: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run, is_ahead: bool) -> list[float]:
        losses = [run.step(number) for number in range(3)]
        assert run.found_all == is_ahead
        short = {key: tensor[:, :5].contiguous() for key, tensor in models.batch("llama", 3).items()}
        losses += [run.step(3, **short), run.step(4, **short)]  # another plan, and other slabs
        assert run.found_all == is_ahead
        run.model.eval()
        with torch.no_grad():
            losses.append(float(run.model(**models.batch("llama", 5)).loss))
        run.model.train()
        losses += [run.step(6), run.step(7)]
        assert run.found_all == is_ahead
        hook = run.model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            run.step(8)
        hook.remove()
        losses += [run.step(8), run.step(9)]
        assert run.found_all == is_ahead
        run.session.come_to_rest()
        return [*losses, run.step(10), run.step(11)]

    def fail(*_: object) -> None:
        raise ArithmeticError

    ahead.read_ahead_never(monkeypatch)
    plain = Run(tmp_path / "plain", weights=weights, update=update)
    expected = train(plain, False)
    ahead.read_ahead_always(monkeypatch)
    run = Run(tmp_path / "ahead", weights=weights, update=update)
    assert train(run, True) == expected
    ours, theirs = run.end(), plain.end()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_steps_that_guess_at_the_norm_and_steps_that_do_not_may_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> tuple[list[float], list[tuple[bool, bool]]]:
        losses, lists = [], []
        for number in range(14):
            losses.append(run.step(number, scale=1e-5 if 3 <= number < 10 else 1.0))
            lists.append((run.optimizer.last_result.wary, run.found_all))
        return losses, lists

    ahead.read_ahead_never(monkeypatch)
    plain = Run(tmp_path / "plain", update="overlap")
    expected, lists = train(plain)
    assert [wary for wary, _ in lists] == [True] * 6 + [False] * 5 + [True] * 3
    ahead.read_ahead_always(monkeypatch)
    run = Run(tmp_path / "ahead", update="overlap")
    found, lists = train(run)
    assert [found for _, found in lists] == [False] + [True] * 5 + [False] * 6 + [True] * 2
    assert found == expected
    ours, theirs = run.end(), plain.end()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_state_is_read_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.read_ahead_always(monkeypatch)
    run = Run(tmp_path)
    moved = DiskEngine.run
    reads: list[int] = []

    def count(engine: DiskEngine, batch: Batch, is_write: bool) -> None:
        reads.append(0 if is_write else int(batch["num_bytes"].sum()))
        moved(engine, batch, is_write)

    monkeypatch.setattr(DiskEngine, "run", count)
    per_step = []
    for number in range(4):
        reads.clear()
        run.step(number)
        per_step.append(sum(reads))
    traced = sum(span.amount for span in run.optimizer.last_result.traces[-1].spans if span.kind == "READ")
    assert per_step[2] == per_step[3] == traced
    states = sum(unit.layout.extent_bytes for unit in run.session.units)
    assert states <= per_step[3] < 1.5 * states
    run.end()


def test_a_step_that_is_skipped_leaves_the_states_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(store: Path) -> dict[str, torch.Tensor]:
        run = Run(store)
        hook = None
        for number in range(6):
            if number == 3:
                hook = run.model.model.layers[1].register_full_backward_hook(
                    lambda _, grads, __: (grads[0] * float("inf"),)
                )
            try:
                run.step(number)
            except (spillway.NonFinite, SkippedStep):
                assert number == 3
            if hook is not None:
                hook.remove()
        return run.end()

    ahead.read_ahead_never(monkeypatch)
    expected = train(tmp_path / "plain")
    ahead.read_ahead_always(monkeypatch)
    found = train(tmp_path / "ahead")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_goes_on_from_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.read_ahead_always(monkeypatch)
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    for number in range(6):
        whole.step(number)
    for number in range(3):
        cut.step(number)
    cut.session.come_to_rest()
    cut.end()
    again = Run(tmp_path / "cut", resume=True)
    for number in range(3, 6):
        again.step(number)
    ours, theirs = again.end(), whole.end()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
