"""One step of ours equals one step of plain PyTorch, for every placement, update mode and cut of the batch."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import models
import reference
import spillway
from spillway.api import close, read_parameters
from spillway.assembly import prepared
from spillway.plan.policies import POLICIES
from spillway.spec.plan import ACTIVATIONS, UPDATE_MODES

STEPS, FEW = 20, 6  # backwards under -m full, and in every run
LR = 1e-3
CLIP = 1.0


@dataclass(frozen=True)
class Case:
    model: str
    place: str
    update: str
    micro_batch: int | None
    accumulation: int
    activations: str = "recompute"
    policy: str = "auto"
    device: str = "cpu"
    steps: int = 0  # of optimizer; 0: at least STEPS backwards
    shorter: int = 12  # every other step's length, beside 16: another shape of batch has another plan

    @property
    def num_steps(self) -> int:
        return self.steps or -(-STEPS // self.accumulation)

    def __str__(self) -> str:
        cut = "whole" if self.micro_batch is None else f"cut{4 // self.micro_batch}"
        return f"{self.model}-{self.place}-{self.update}-{cut}-acc{self.accumulation}-{self.activations}"


def batches(case: Case) -> list[list[dict[str, torch.Tensor]]]:
    """Every step's batches; their length may change from step to step, to shorter ones and back."""
    numbers = itertools.count()
    return [
        [models.batch(case.model, next(numbers), length=(16, case.shorter)[step % 2]) for _ in range(case.accumulation)]
        for step in range(case.num_steps)
    ]


def train(
    case: Case, model: torch.nn.Module, store: Path, clip: float | None = CLIP
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = spillway.prepare(
        model,
        spillway.AdamW(lr=LR, eps=reference.EPS, max_grad_norm=clip),
        store=store,
        device=case.device,
        update=case.update,
        activations=case.activations,
        policy=case.policy,
        weights=case.place,
        states=case.place,
        micro_batch=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
    )
    losses = []
    for parts in batches(case):
        for part in parts:
            part = {key: tensor.to(case.device) for key, tensor in part.items()}
            loss = models.loss_of(model(**part))
            (loss / len(parts)).backward()
            losses.append(loss.item())
        optimizer.step()
    weights = read_parameters(model)
    assert prepared(model).session.engine.schedule is not None
    close(model)
    return losses, weights


def assert_equal_to_plain(case: Case, tmp_path: Path) -> None:
    plain = models.MODELS[case.model]()
    losses, weights = train(case, copy.deepcopy(plain), tmp_path / "store")
    expected = reference.train(plain, batches(case), LR, CLIP)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=f"{name} of {case}")


PLACES = ("disk", "host", "device")
ALL = [
    Case(*choice)
    for choice in itertools.product(models.MODELS, PLACES, UPDATE_MODES, (None, 1), (1, 3), ACTIVATIONS[1:])
]
# Every pair of a model and a placement, and of an update mode and a way to keep activations; all runs under -m full.
SAMPLE = [
    Case(
        name,
        place,
        UPDATE_MODES[index % len(UPDATE_MODES)],
        (None, 1)[index % 2],
        times := (1, 3)[index // 2 % 2],
        ACTIVATIONS[1 + index % (len(ACTIVATIONS) - 1)],
        steps=FEW // times,
    )
    for index, (name, place) in enumerate(itertools.product(models.MODELS, PLACES))
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_steps_equal_plain_pytorch(case: Case, tmp_path: Path) -> None:
    assert_equal_to_plain(case, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=str)
def test_twenty_steps_equal_plain_pytorch_everywhere(case: Case, tmp_path: Path) -> None:
    assert_equal_to_plain(case, tmp_path)


@pytest.mark.gpu
@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", ("disk", "host", "device"))
@pytest.mark.parametrize("update", UPDATE_MODES)
def test_twenty_steps_on_the_gpu_equal_plain_pytorch(place: str, update: str, tmp_path: Path) -> None:
    case = Case("llama", place, update, None, 1, device="cuda")
    plain = models.llama()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=LR, eps=reference.EPS, max_grad_norm=CLIP),
        store=tmp_path / "store",
        device="cuda",
        update=update,
        weights=place,
        states=place,
    )
    plain.cuda()
    moved = [[{key: tensor.cuda() for key, tensor in part.items()} for part in parts] for parts in batches(case)]
    losses = []
    for parts in moved:
        loss = model(**parts[0]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = reference.train(plain, moved, LR, CLIP)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach().cpu(), rtol=1e-4, atol=1e-4)
    close(model)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
@pytest.mark.parametrize("place", ("disk", "host"))
def test_bfloat16_gives_the_same_bits_as_fp32_masters(name: str, place: str, tmp_path: Path) -> None:
    case = Case(name, place, "overlap", None, 1, steps=FEW)
    plain = models.MODELS[name]().to(torch.bfloat16)
    losses, weights = train(case, copy.deepcopy(plain), tmp_path / "store", None)
    expected = reference.train_bf16(plain, batches(case), LR)
    # The head and its loss are computed in pieces, so the last bits of the loss may differ; the weights show whether
    # its gradient did.
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for key, param in plain.named_parameters():
        assert torch.equal(weights[key], param.detach()), f"{key} of {case}"


WAYS = list(itertools.product(("disk", "host", "device", "auto"), UPDATE_MODES, ACTIVATIONS[1:]))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Without it PyTorch itself scatters to experts in an order that changes from run to run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", tuple(models.MODELS))
def test_placement_update_mode_and_activations_never_change_bits(name: str, tmp_path: Path) -> None:
    assert_same_bits(name, WAYS[::27], tmp_path, shorter=16)


@pytest.mark.full
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", tuple(models.MODELS))
def test_nothing_that_is_chosen_changes_bits(name: str, tmp_path: Path) -> None:
    assert_same_bits(name, WAYS, tmp_path, shorter=12)


def assert_same_bits(name: str, ways: list[tuple[str, str, str]], tmp_path: Path, shorter: int) -> None:
    results = []
    for index, (place, update, activations) in enumerate(ways):
        case = Case(name, place, update, 2, 1, activations, steps=4, shorter=shorter)
        results.append(train(case, models.MODELS[name](), tmp_path / str(index), None))
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(weights[key], results[0][1][key]) for key in weights)


# Two with accumulation, so that both kinds of lists are run.
@pytest.mark.parametrize("policy", tuple(POLICIES))
def test_the_planners_of_the_field_train_as_plain_pytorch(policy: str, tmp_path: Path) -> None:
    times = 2 if policy in ("auto", "fuyou") else 1
    assert_equal_to_plain(
        Case("llama", "auto", "auto", 2, times, "auto", policy, steps=FEW // times, shorter=16), tmp_path
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", ACTIVATIONS[1:])
def test_dropout_draws_the_same_numbers_as_plain_pytorch(activations: str, tmp_path: Path) -> None:
    case = Case("gpt2", "disk", "overlap", None, 1, activations, steps=FEW)
    plain = models.gpt2(dropout=0.1)
    ours = copy.deepcopy(plain)
    plain.train()
    ours.train()
    torch.manual_seed(7)
    losses, _ = train(case, ours, tmp_path / "store", None)
    torch.manual_seed(7)
    expected = reference.train(plain, batches(case), LR, None)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_experts_as_grouped_products_are_cut_and_taped(tmp_path: Path) -> None:
    case = Case("mixtral", "disk", "overlap", 1, 1, "tape", steps=4)
    plain = models.mixtral("grouped_mm")
    losses, weights = train(case, copy.deepcopy(plain), tmp_path / "store")
    torch.testing.assert_close(losses, reference.train(plain, batches(case), LR, CLIP), rtol=1e-5, atol=0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
