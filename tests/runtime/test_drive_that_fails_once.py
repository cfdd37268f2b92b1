"""A drive that fails for a moment: what a step had updated before that is not lost beside what is updated again."""

from pathlib import Path

import pytest
import torch

import models
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.optim.optimizer import StreamingOptimizer
from spillway.plan import make
from spillway.plan.search import Search, Timed
from spillway.spec.errors import DiskError

STEPS = 5


class Mixed(Search):
    """Finds plans that leave every other update to the next forward."""

    def run(self) -> Timed:
        placement = super().run().candidate.placement
        return self._simulate(self._candidates.of(placement, range(1, len(placement.units), 2)))


def prepare(
    store: Path, max_grad_norm: float | None, weights: str, resume: bool = False
) -> tuple[torch.nn.Module, StreamingOptimizer]:
    return spillway.prepare(
        models.llama(),
        spillway.AdamW(lr=1e-2, max_grad_norm=max_grad_norm),
        store=store,
        device="cpu",
        update="overlap",
        weights=weights,
        states="disk",
        resume=resume,
    )


def train(model: torch.nn.Module, optimizer: StreamingOptimizer, steps: range) -> None:
    for number in steps:
        model(**models.batch("llama", number)).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """Before the last step, after it, and two steps on: the same wherever things rest, with nothing to clip."""
    found = []
    for steps in (STEPS - 1, STEPS, STEPS + 2):
        model, optimizer = prepare(tmp_path_factory.mktemp("plain"), None, "host")
        train(model, optimizer, range(steps))
        found.append(read_parameters(model))
        close(model)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("call", ("read", "write", "sync"))
@pytest.mark.parametrize("place", ("forward", "flush"))
@pytest.mark.parametrize(("max_grad_norm", "weights"), ((None, "disk"), (1e3, "disk"), (None, "host")))
def test_a_step_whose_updates_are_partly_due_ends_as_a_whole_or_not_at_all(
    max_grad_norm: float | None,
    weights: str,
    place: str,
    call: str,
    expected: list[dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(make, "Search", Mixed)
    run = tmp_path / "run"
    model, optimizer = prepare(run, max_grad_norm, weights)
    train(model, optimizer, range(STEPS))
    session = prepared(model).session
    late = [where.defers for where in session.engine.in_force.plan.placement.units]
    assert any(late) and not all(late) and session.rest.due is not None
    with monkeypatch.context() as patch:
        break_drive(patch, session.store.homes.need_disk(), call)
        with pytest.raises(DiskError, match="for a moment"):
            model(**models.batch("llama", STEPS)) if place == "forward" else session.come_to_rest()
            session.come_to_rest()  # the forward may be over before its last write is
    try:  # the drive is back: in the same process, where that may be
        train(model, optimizer, range(STEPS, STEPS + 2))
    except spillway.UsageError as error:
        assert "resume from the last saved point" in str(error)
    else:
        assert same(read_parameters(model), expected[2])
        close(model)
        return
    close(model)
    model, optimizer = prepare(run, max_grad_norm, weights, resume=True)
    found = read_parameters(model)
    assert optimizer.num_steps in (STEPS - 1, STEPS) and same(found, expected[optimizer.num_steps - STEPS + 1])
    close(model)


def break_drive(patch: pytest.MonkeyPatch, disk: object, call: str) -> None:
    def broken(*_: object, **__: object) -> None:
        raise DiskError("the drive fails for a moment")

    patch.setattr(disk, {"read": "read_all", "write": "write_all", "sync": "sync"}[call], broken)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)
