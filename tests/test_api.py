"""The Python API: what a user's own loop meets."""

import copy
import gc
import io
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import directories
import models
import reference
import spillway
from spillway import assembly, native
from spillway.api import read_parameters
from spillway.assembly import prepared
from spillway.spec.errors import NonFinite, StoreMoves, UsageError
from spillway.spec.plan import UPDATE_MODES

SETTINGS = spillway.AdamW(lr=1e-3, eps=reference.EPS, max_grad_norm=None)


def test_importing_spillway_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, spillway; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_load_train_and_save_a_directory(tmp_path: Path) -> None:
    directory = directories.make_model(tmp_path / "llama")
    model = spillway.load(directory, AutoModelForCausalLM, dtype="float32")
    assert all(param.is_meta for param in model.parameters())
    model, optimizer = spillway.prepare(model, SETTINGS, store=tmp_path / "store", device="cpu", states="disk")
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    steps = [[models.batch("llama", seed)] for seed in range(3)]
    for (batch,) in steps:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    reference.train(plain, steps, 1e-3, None)
    spillway.save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    spillway.close(model)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_saving_what_was_loaded_gives_the_same_logits(tmp_path: Path) -> None:
    directory = directories.make_model(tmp_path / "gpt2", architecture="gpt2")
    model = spillway.load(directory, AutoModelForCausalLM, dtype="float32")
    model, _ = spillway.prepare(model, SETTINGS, store=tmp_path / "store", device="cpu")
    spillway.save_pretrained(model, tmp_path / "out")
    spillway.close(model)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (directory, tmp_path / "out"))
    ids = torch.arange(12)[None]
    assert torch.equal(before.eval()(ids).logits, after.eval()(ids).logits)


def test_evaluation_and_generation_stream_the_weights(tmp_path: Path) -> None:
    plain = models.llama()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu", weights="disk", states="disk"
    )
    batch = models.batch("llama", 0)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    model(**batch).loss.backward()
    optimizer.step()
    reference.train(plain, [[batch]], 1e-3, None)
    model.eval()
    plain.eval()
    ids = batch["input_ids"][:1, :8]
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)
        ours = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(ours, plain.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0))
    spillway.close(model)


@pytest.mark.parametrize("activations", ("recompute", "keep", "disk"))
def test_frozen_parameters_are_neither_updated_nor_given_states_nor_gone_back_through(
    tmp_path: Path, activations: str
) -> None:
    plain = models.llama()
    plain.requires_grad_(False)
    plain.model.layers[1].requires_grad_(True)
    plain.model.layers[2].mlp.requires_grad_(True)
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        SETTINGS,
        store=tmp_path / "store",
        device="cpu",
        weights="disk",
        states="disk",
        activations=activations,
    )
    steps = [[models.batch("llama", seed)] for seed in range(4)]
    for (batch,) in steps:
        model(**batch).loss.backward()
        optimizer.step()
    start = dict(copy.deepcopy(plain).named_parameters())
    reference.train(plain, steps, 1e-3, None)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5)
        assert param.requires_grad or torch.equal(weights[name], start[name])
    units = prepared(model).session.units
    assert sum(unit.layout.state_bytes > 0 for unit in units) == 2
    ops = prepared(model).session.engine.in_force.plan.ops
    behind = {units[op.unit].name for op in ops if op.kind == "BACKWARD"}
    assert "model.layers.1" in behind and not behind & {"model.embed_tokens", "model.layers.0"}
    spillway.close(model)


def test_schedulers_work_on_the_optimizer(tmp_path: Path) -> None:
    plain = models.two_lists()
    model, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu")
    other = torch.optim.AdamW(reference.groups(plain, 0.01), lr=1e-3, eps=reference.EPS, fused=True)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.1) for o in (optimizer, other)]
    for seed in range(5):
        batch = models.batch("two_lists", seed)
        for stepped, wrapped in ((optimizer, model), (other, plain)):
            wrapped(**batch).backward()
            stepped.step()
            stepped.zero_grad()
        for schedule in schedules:
            schedule.step()
    for name, weight in read_parameters(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name].detach(), rtol=1e-5, atol=1e-6)
    assert isinstance(optimizer, torch.optim.Optimizer)
    spillway.close(model)


def test_without_a_store_everything_rests_in_host_memory() -> None:
    plain = models.gpt2()
    model, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    batch = models.batch("gpt2", 0)
    model(**batch).loss.backward()
    optimizer.step()
    reference.train(plain, [[batch]], 1e-3, None)
    for name, weight in read_parameters(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name].detach(), rtol=1e-5, atol=1e-6)
    spillway.close(model)


def test_the_plain_path_trains_the_same_without_the_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "it is not there"))
    plain = models.llama()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu", weights="disk", states="disk"
    )
    steps = [[models.batch("llama", seed)] for seed in range(3)]
    for (batch,) in steps:
        model(**batch).loss.backward()
        optimizer.step()
    reference.train(plain, steps, 1e-3, None)
    for name, weight in read_parameters(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name].detach(), rtol=1e-5, atol=1e-5)
    assert prepared(model).session.store.homes.read_engine.backend == "preadv"
    spillway.close(model)


class LooksAtValues(nn.Module):
    """Its forward cannot run on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
            if float(x.detach().sum()) > 1e9:
                x = x * 0
        return x.square().mean()


def test_a_forward_that_looks_at_values_is_profiled_on_real_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = LooksAtValues()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu", weights="disk", states="disk"
    )
    other = torch.optim.AdamW(reference.groups(plain, 0.01), lr=1e-3, eps=reference.EPS, fused=True)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model(x).backward()
        optimizer.step()
        plain(x).backward()
        other.step()
        other.zero_grad()
    for name, weight in read_parameters(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name].detach(), rtol=1e-5, atol=1e-6)
    spillway.close(model)


def test_a_forward_without_backward_is_forgotten(tmp_path: Path) -> None:
    plain = models.llama()
    model, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu")
    model(**models.batch("llama", 5))
    batch = models.batch("llama", 0)
    model(**batch).loss.backward()
    optimizer.step()
    reference.train(plain, [[batch]], 1e-3, None)
    for name, weight in read_parameters(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name].detach(), rtol=1e-5, atol=1e-6)
    spillway.close(model)


def test_a_wrong_order_of_calls_is_explained(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(models.llama(), SETTINGS, store=tmp_path / "store", device="cpu")
    with pytest.raises(UsageError, match=r"optimizer.step\(\) came after 0 of 1 backward"):
        optimizer.step()
    model(**models.batch("llama", 0)).loss.backward()
    with pytest.raises(UsageError, match="pass gradient_accumulation_steps="):
        model(**models.batch("llama", 1))
    spillway.close(model)


def test_a_gradient_that_is_not_finite_is_named_and_not_applied(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(), SETTINGS, store=tmp_path / "store", device="cpu", weights="disk", states="disk"
    )
    batch = models.batch("llama", 0)
    before = read_parameters(model)
    loss = model(**batch).loss * float("inf")
    with pytest.raises(NonFinite, match="a gradient of lm_head is infinite or not a number"):
        loss.backward()  # raises here if the lanes are quick, at the step otherwise
        optimizer.step()
    after = read_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model(**batch).loss.backward()
    optimizer.step()
    spillway.close(model)


def test_an_earlier_run_in_the_store_is_resumed_or_refused_but_never_overwritten(tmp_path: Path) -> None:
    plain = models.llama()
    steps = [[models.batch("llama", seed)] for seed in range(4)]
    for part, resume in ((steps[:2], False), (steps[2:], True)):
        model, optimizer = spillway.prepare(
            copy.deepcopy(plain),
            SETTINGS,
            store=tmp_path / "store",
            device="cpu",
            weights="disk",
            states="disk",
            resume=resume,
        )
        for (batch,) in part:
            model(**batch).loss.backward()
            optimizer.step()
        weights = read_parameters(model)
        spillway.close(model)
    with pytest.raises(UsageError, match="holds step 4 of an earlier run"):
        spillway.prepare(copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu")
    reference.train(plain, steps, 1e-3, None)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5)


def test_logits_are_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spillway.integrations import loss as chunked

    monkeypatch.setitem(chunked._LOGIT_BYTES, "cpu", 4 * models.VOCAB * 5)
    plain = models.llama()
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), spillway.AdamW(lr=1e-3, max_grad_norm=1.0), store=tmp_path / "s", device="cpu"
    )
    largest = 0
    original = nn.functional.cross_entropy

    def watched(scores: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        nonlocal largest
        if type(scores) is torch.Tensor:  # not the shapes-only forward of the profiler
            largest = max(largest, scores.shape[0])
        return original(scores, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.functional, "cross_entropy", watched)
    batch = models.batch("llama", 0)
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    assert largest == 5 and output.logits is None
    torch.testing.assert_close(output.loss.item(), plain(**batch).loss.item(), rtol=1e-5, atol=0)
    spillway.close(model)


# What must not go wrong silently #


def trained(tmp_path: Path, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    settings = {"store": tmp_path / "store", "device": "cpu", "weights": "disk", "states": "disk", **options}
    return spillway.prepare(models.llama(), SETTINGS, **settings)  # type: ignore[arg-type]


def test_a_closed_model_cannot_be_used(tmp_path: Path) -> None:
    directory = directories.make_model(tmp_path / "llama")
    model = spillway.load(directory, AutoModelForCausalLM, dtype="float32")
    model, optimizer = spillway.prepare(model, SETTINGS, store=tmp_path / "store", device="cpu", states="disk")
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    spillway.close(model)
    for use in (
        lambda: model(**models.batch("llama", 0)),
        lambda: spillway.save_pretrained(model, tmp_path / "out"),
        lambda: spillway.save_point(model),
    ):
        with pytest.raises(UsageError, match="was closed"):
            use()


def test_a_resume_from_nowhere_or_into_another_run_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    spillway.close(model)
    with pytest.raises(UsageError, match="no saved point in"):
        trained(tmp_path, resume=tmp_path / "typo", store=tmp_path / "fresh")
    with pytest.raises(UsageError, match="holds another run than"):
        trained(tmp_path, resume=tmp_path / "typo")
    with pytest.raises(UsageError, match="needs store="):
        spillway.prepare(models.llama(), SETTINGS, resume=True, device="cpu")
    model, optimizer = trained(tmp_path, resume=True)
    model(**models.batch("llama", 0))
    assert optimizer.num_steps == 1
    spillway.close(model)


def test_the_backward_of_an_older_forward_is_refused(tmp_path: Path) -> None:
    model, _ = trained(tmp_path)
    first = model(**models.batch("llama", 0)).loss
    model(**models.batch("llama", 1))
    with pytest.raises(UsageError, match="an earlier forward"):
        first.backward()
    sums = model(**models.batch("llama", 0)).loss + model(**models.batch("llama", 1)).loss
    with pytest.raises(UsageError, match="an earlier forward"):
        sums.backward()
    spillway.close(model)


class Stashing(nn.Module):
    """A block that leaves something behind besides what it returns."""

    def __init__(self, stash: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.stash = nn.Linear(8, 8), stash

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left = self.stash(self.linear, x)
        return x + self.linear(x).relu()


class Stashes(nn.Module):
    def __init__(self, stash: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Stashing(stash) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.sum() + sum(block.left.sum() for block in self.blocks)


@pytest.mark.parametrize("activations", ("recompute", "tape", "keep", "host"))
@pytest.mark.parametrize("stash", (lambda linear, x: linear(x).softmax(-1), lambda _, x: x), ids=("computed", "input"))
def test_a_loss_of_what_a_unit_does_not_return_is_refused(
    stash: Callable[[nn.Linear, torch.Tensor], torch.Tensor], activations: str
) -> None:
    model, _ = spillway.prepare(Stashes(stash), spillway.AdamW(), device="cpu", activations=activations)
    with pytest.raises(UsageError, match=r"computed within Stashing\.forward"):
        model(torch.ones(2, 8)).backward()
    spillway.close(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("update", UPDATE_MODES)  # where the planner mixes them that is refused
def test_reading_and_evaluating_between_backward_and_step_change_nothing(update: str, tmp_path: Path) -> None:
    ends = []
    for disturb in (False, True):
        model, optimizer = trained(tmp_path / str(disturb), update=update)
        for step in range(3):
            loss = model(**models.batch("llama", step)).loss
            if disturb:
                with torch.no_grad():
                    model(**models.batch("llama", 9))
            loss.backward()
            if disturb:
                read_parameters(model)
                with torch.no_grad():
                    model(**models.batch("llama", 9))
            optimizer.step()
        ends.append(read_parameters(model))
        spillway.close(model)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Aliasing(nn.Module):
    """A unit that returns a view of its parameter, one that runs without gradients, and a count of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 8)
        self.teacher = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.free = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = self.positions(torch.arange(x.shape[0]))
        with torch.no_grad():
            target = self.teacher(x)
        hidden = x + position + self.free
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return (hidden - target).square().mean()


class View(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[: ids.shape[0]]


def test_views_of_parameters_frozen_passes_buffers_and_free_parameters_are_as_in_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Aliasing()
    plain.positions = View(16, 8)
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), SETTINGS, store=tmp_path / "store", device="cpu", weights="disk", states="disk"
    )
    other = torch.optim.AdamW(reference.groups(plain, 0.01), lr=1e-3, eps=reference.EPS, fused=True)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(torch.ones(4, 8)), plain.eval()(torch.ones(4, 8)))
    model.train(), plain.train()
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = []
        for net, optim in ((model, optimizer), (plain, other)):
            loss = net(x)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = read_parameters(model), dict(plain.named_parameters())
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-5, atol=1e-6)
    spillway.close(model)


def test_a_model_that_did_not_fit_can_be_prepared_again(tmp_path: Path) -> None:
    model = models.llama()
    with pytest.raises(spillway.PlanInfeasible):
        spillway.prepare(
            model, SETTINGS, store=tmp_path, device="cpu", host_memory="1MB", example=models.batch("llama", 0)
        )
    model, optimizer = spillway.prepare(model, SETTINGS, store=tmp_path, device="cpu")
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    spillway.close(model)


def test_a_saved_point_is_made_where_states_rest_in_memory(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, weights="host", states="host")
    for step in range(3):
        model(**models.batch("llama", step)).loss.backward()
        optimizer.step()
    assert spillway.save_point(model) == 3
    before = read_parameters(model)
    spillway.close(model)
    model, optimizer = trained(tmp_path, resume=True)
    after = read_parameters(model)
    assert optimizer.num_steps == 3 and all(torch.equal(before[name], after[name]) for name in before)
    spillway.close(model)


def test_a_step_goes_on_after_one_whose_gradient_was_not_finite(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, gradient_accumulation_steps=2)
    model(**models.batch("llama", 0)).loss.backward()
    with pytest.raises(NonFinite):
        (model(**models.batch("llama", 1)).loss * float("nan")).backward()
        optimizer.step()
    for seed in (0, 1):
        model(**models.batch("llama", seed)).loss.backward()
    optimizer.step()
    assert optimizer.num_steps == 1
    spillway.close(model)


def test_wrong_optimizers_and_counts_are_refused() -> None:
    plain = models.two_lists()
    with pytest.raises(UsageError, match="give spillway.AdamW"):
        spillway.prepare(plain, torch.optim.AdamW(plain.parameters()), device="cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="micro_batch must be at least 1"):
        spillway.prepare(plain, SETTINGS, micro_batch=0, device="cpu")
    wrong: list[tuple[Any, str]] = [
        (spillway.AdamW(lr=-1.0), "lr must be a number that is not negative, not -1.0"),
        (spillway.AdamW(weight_decay=float("nan")), "weight_decay must be a number that is not negative, not nan"),
        (spillway.Lion(weight_decay=-1.0), "weight_decay must be a number that is not negative, not -1.0"),
        (spillway.AdamW(eps=0.0), "eps must be more than 0, not 0.0"),
        (spillway.AdamW(betas=(0.9, 1.0)), r"betas and momentum must be in \[0, 1\)"),
        (spillway.AdamW(master_bits=24), "master_bits=24 is for bfloat16 weights"),
    ]
    for settings, why in wrong:
        with pytest.raises(UsageError, match=why):
            spillway.prepare(plain, settings, device="cpu")
    for values, why in (({"lr": -1.0}, "group 0: lr must"), ({"eps": -1.0}, "group 0: eps must")):
        with pytest.raises(UsageError, match=why):
            groups = [{"params": list(plain.parameters())[:1], **values}]
            spillway.prepare(plain, spillway.AdamW(), device="cpu", param_groups=groups)
    for smoothing in (-1.0, 3.0):
        with pytest.raises(UsageError, match=r"label_smoothing must be in \[0, 1\)"):
            spillway.prepare(plain, device="cpu", label_smoothing=smoothing)


def test_a_store_path_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is given twice"):
        spillway.prepare(models.two_lists(), store=[tmp_path / "a", tmp_path / "b" / ".." / "a"], device="cpu")


def test_more_blocks_than_a_model_has_are_refused(tmp_path: Path) -> None:
    directory = directories.make_model(tmp_path / "model")
    for number in (-1, 0, 99):
        with pytest.raises(UsageError, match=f"the first {number} of them cannot be taken"):
            spillway.load(directory, AutoModelForCausalLM, num_layers=number)


class Mixing(nn.Module):
    """Blocks that give more than rows: router scores of all tokens, and a mean over the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ModuleList(MixingBlock(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = x.new_zeros(())
        for block, head in zip(self.blocks, self.heads, strict=True):
            x, more = head(block(x))
            extra = extra + more.square().mean()
        return x.square().mean() + extra


class MixingBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.linear(x))
        return hidden, hidden.flatten(0, 1) if self.kind == "tokens" else hidden.mean(0)


@pytest.mark.parametrize("kind", ("tokens", "mean"))
def test_units_whose_outputs_are_not_rows_are_not_cut(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    plain = Mixing(kind)
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, store=tmp_path, device="cpu", micro_batch=1)
    x = torch.randn(4, 3, 8)
    assert model(x).item() == pytest.approx(plain(x).item(), rel=1e-6)
    spillway.close(model)


def test_batches_can_be_sent_to_the_device_the_model_names(tmp_path: Path) -> None:
    plain = models.llama()
    kind = type(plain)
    model, _ = spillway.prepare(plain, spillway.AdamW(), store=tmp_path, device="cpu")
    assert model.device == torch.device("cpu") and isinstance(model, kind)
    assert type(model).__name__ == kind.__name__
    spillway.close(model)


def test_a_second_backward_over_one_forward_is_refused() -> None:
    model, _ = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    loss = model(**models.batch("llama", 0)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="backward ran a second time|call optimizer.step"):
        loss.backward()
    spillway.close(model)


def test_parameters_are_not_added_afterwards() -> None:
    model, optimizer = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    with pytest.raises(UsageError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    spillway.close(model)


def test_going_on_where_nothing_was_saved_is_told(tmp_path: Path) -> None:
    with pytest.warns(spillway.NothingSaved, match="holds no saved point"):
        model, _ = spillway.prepare(models.llama(), SETTINGS, store=tmp_path / "store", device="cpu", resume=True)
    spillway.close(model)


def test_a_batch_on_another_device_is_refused_before_anything_is_planned() -> None:
    model, _ = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    batch = models.batch("llama", 0)
    with pytest.raises(UsageError, match="is on meta and the model computes on cpu"):
        model(**{name: tensor.to("meta") for name, tensor in batch.items()})
    assert not prepared(model).session.engine.is_open
    spillway.close(model)


def test_the_source_of_a_model_is_not_written_over(tmp_path: Path) -> None:
    directory = directories.make_model(tmp_path / "llama")
    model, _ = spillway.prepare(spillway.load(directory, AutoModelForCausalLM), SETTINGS, device="cpu")
    with pytest.raises(UsageError, match="loaded from"):
        spillway.save_pretrained(model, directory)
    spillway.close(model)


class Mover(nn.Module):
    """Asks its weights where they are, as some models do before they look up their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids.to(self.table.weight.device))
        return self.linear(rows.to(self.linear.weight.dtype)).square().mean()


def test_a_model_may_ask_its_parameters_where_they_are_but_not_for_their_values() -> None:
    torch.manual_seed(0)
    plain = Mover()
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    ids = torch.arange(11)
    assert model(ids).item() == plain(ids).item()
    assert (model.linear.weight.device.type, tuple(model.linear.weight.shape)) == ("cpu", (8, 8))
    assert "Placeholder((8, 8)" in repr(model.linear.weight)
    for misuse in (
        lambda weight: weight.sum(),
        lambda weight: torch.ones(2, 8) @ weight,
    ):
        with pytest.raises(UsageError, match=r"given linear\.weight, a parameter of a model that streams"):
            misuse(model.linear.weight)
    with pytest.raises(UsageError, match=r"linear\.weight has no values to save"):
        torch.save(model.linear.state_dict(), io.BytesIO())
    spillway.close(model)


class Gains(nn.Module):
    """Parameters in a list that is no module of its own: it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gains = nn.ParameterList(nn.Parameter(torch.full((8,), 0.5 + number)) for number in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + gain * torch.relu(layer(x))
        return x.square().mean()


def test_parameters_in_a_list_are_those_of_the_module_that_holds_it() -> None:
    torch.manual_seed(0)
    plain = Gains()
    model, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    other = torch.optim.AdamW(reference.groups(plain, 0.01), lr=1e-3, eps=reference.EPS, fused=True)
    for number in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        for each, step in ((model(x), optimizer), (plain(x), other)):
            each.backward()
            step.step()
        other.zero_grad()
    for name, weight in read_parameters(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name].detach(), rtol=1e-5, atol=1e-6)
    spillway.close(model)


@pytest.mark.parametrize("update", ("serial", "overlap", "deferred"))
def test_a_learning_rate_that_comes_after_the_forward_it_is_for_is_refused(update: str) -> None:
    model, optimizer = spillway.prepare(models.llama(), SETTINGS, device="cpu", update=update)
    model(**models.batch("llama", 0)).loss.backward()
    before, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.5
    with pytest.raises(UsageError, match="was changed after the forward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = before
    optimizer.step()
    assert optimizer.num_steps == 1
    spillway.close(model)


def test_states_of_another_optimizer_are_not_taken_for_ours() -> None:
    plain = models.llama()
    other = torch.optim.AdamW(plain.parameters())
    plain(**models.batch("llama", 0)).loss.backward()
    other.step()
    model, optimizer = spillway.prepare(plain, SETTINGS, device="cpu")
    with pytest.raises(UsageError, match="rest in the store"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    spillway.close(model)


def test_a_grad_scaler_is_refused_and_one_that_is_off_does_nothing() -> None:
    model, optimizer = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(**models.batch("llama", 0)).loss).backward()
    off.step(optimizer)
    assert optimizer.num_steps == 1
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**models.batch("llama", 1)).loss).backward()
    with pytest.raises(UsageError, match="GradScaler"):
        scaler.step(optimizer)
    spillway.close(model)


def test_an_example_without_tensors_is_refused_and_the_model_may_be_prepared_with_another() -> None:
    model = models.llama()
    with pytest.raises(UsageError, match="no tensor in it"):
        spillway.prepare(model, SETTINGS, device="cpu", example={"input_ids": 1})
    spillway.prepare(model, SETTINGS, device="cpu", example=models.batch("llama", 0))
    spillway.close(model)


@pytest.mark.parametrize("reentrant", (False, True))
def test_what_is_computed_again_is_for_the_plan_to_say(reentrant: bool) -> None:
    plain = models.llama()
    model = copy.deepcopy(plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model, _ = spillway.prepare(model, SETTINGS, device="cpu")
    batch = models.batch("llama", 0)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    spillway.close(model)


@pytest.mark.parametrize("looks", (False, True))
def test_a_model_that_was_closed_is_freed(looks: bool) -> None:
    model: Any = LooksAtValues() if looks else models.llama()
    model, optimizer = spillway.prepare(model, SETTINGS, device="cpu")
    (model(torch.ones(4, 8)) if looks else model(**models.batch("llama", 0)).loss).backward()
    optimizer.step()
    spillway.close(model)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_a_prepare_that_fails_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    batch, expected = models.batch("llama", 0), [param.requires_grad for param in model.parameters()]
    before = model(**batch).loss.item()
    with pytest.raises(UsageError, match="label smoothing"):
        spillway.prepare(models.two_lists(), SETTINGS, device="cpu", label_smoothing=0.1)

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for buffers")

    monkeypatch.setattr(assembly, "_move_buffers", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        spillway.prepare(model, SETTINGS, device="cpu", store=tmp_path)
    monkeypatch.undo()
    with pytest.raises(spillway.PlanInfeasible):
        spillway.stream(model, device="cpu", host_memory="1MB")
    assert [param.requires_grad for param in model.parameters()] == expected
    assert model(**batch).loss.item() == before
    spillway.prepare(model, SETTINGS, device="cpu", store=tmp_path)
    assert model(**batch).loss.item() == pytest.approx(before)
    spillway.close(model)


def test_a_closed_model_that_is_still_there_holds_no_slabs(tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(models.llama(), SETTINGS, device="cpu", store=tmp_path)
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    pools = weakref.ref(prepared(model).session.engine.pools)
    spillway.close(model)
    del optimizer
    gc.collect()
    assert model is not None and pools() is None


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal_show_how_far_loading_moving_and_saving_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, shown = directories.make_model(tmp_path / "llama"), []
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    for progress in (True, False):
        terminal = _Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        here, there = tmp_path / f"here-{progress}", tmp_path / f"there-{progress}"
        for store, resume in ((here, False), (there, here)):
            model = spillway.load(directory, AutoModelForCausalLM, dtype="float32")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", StoreMoves)
                model, optimizer = spillway.prepare(
                    model, SETTINGS, store=store, resume=resume, states="disk", device="cpu", progress=progress
                )
            model(**models.batch("llama", 0)).loss.backward()
            optimizer.step()
            spillway.save_pretrained(model, tmp_path / "out", progress=progress)
            spillway.close(model)
        shown.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()))
    for label in ("loading weights", "checking and moving the store", "checking the saved point", "/out"):
        assert re.search(rf"{label} ━+ 100%", shown[0]), label
    assert "━" not in shown[1]


@pytest.mark.parametrize("what", ("a part", "a whole"))
def test_a_part_of_a_model_that_streams_is_not_prepared_again(what: str, tmp_path: Path) -> None:
    model = models.two_lists()
    spillway.prepare(model, spillway.AdamW(), store=tmp_path, device="cpu")
    other = nn.ModuleDict({"body": model}) if what == "a whole" else next(model.children())
    with pytest.raises(UsageError, match="streams already, as a part of another model"):
        spillway.prepare(other, spillway.AdamW(), device="cpu")
    spillway.close(model)


def test_an_example_on_another_device_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UsageError, match="meta"):
        spillway.stream(model, device="cpu", example={"input": torch.zeros(1, 8, device="meta")})
    assert model(torch.zeros(1, 8)).requires_grad
    with torch.no_grad():
        expected = model(torch.ones(1, 8))
        spillway.stream(model, device="cpu", example={"input": torch.zeros(1, 8)})
        assert torch.equal(model(torch.ones(1, 8)), expected)
    spillway.close(model)
