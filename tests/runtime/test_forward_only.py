"""Forwards that no backward follows: the same outputs, with units fetched ahead."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import spillway
from spillway.api import close
from spillway.assembly import prepared
from spillway.runtime.window import weight_views
from spillway.spec.trace import Trace
from spillway.store.placed import PlacedStore


def teacher(store: Path, weights: str, name: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A streamed model, and the same one as PyTorch has it."""
    plain = models.MODELS[name]().eval()
    streamed = models.MODELS[name]().eval()
    streamed.load_state_dict(plain.state_dict())
    example = models.batch(name, 1)
    return spillway.stream(streamed, store=store, weights=weights, device="cpu", example=example), plain


def trace_of(model: nn.Module) -> Trace:
    """Of the list that ran last; empty where none did."""
    return prepared(model).session.engine.executor.wait()


def outputs(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(**models.batch(name, 0)).logits)


@pytest.mark.parametrize("weights", ("host", "disk"))
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_a_streamed_model_gives_what_the_plain_one_gives(name: str, weights: str, tmp_path: Path) -> None:
    model, plain = teacher(tmp_path, weights, name)
    expected = plain(**models.batch(name, 0))
    with torch.no_grad():
        for _ in range(3):
            found = model(**models.batch(name, 0))
            assert torch.equal(models.loss_of(found), models.loss_of(expected).detach())
    assert not any(param.requires_grad for param in model.parameters())
    close(model)


def test_units_are_fetched_ahead_once_their_order_is_known(tmp_path: Path) -> None:
    model, _ = teacher(tmp_path, "disk")
    outputs(model, "llama")
    assert not trace_of(model).spans
    outputs(model, "llama")
    trace = trace_of(model)
    kinds = [span.kind for span in trace.spans]
    units = len(prepared(model).session.units)
    forwards = kinds.count("FORWARD")
    assert kinds.count("READ") == kinds.count("UPLOAD") == units
    assert forwards >= units
    first = next(span.end_s for span in trace.spans if span.kind == "FORWARD")
    assert sum(span.kind == "READ" and span.start_s < first for span in trace.spans) > 1
    close(model)


def test_generation_streams_every_token(tmp_path: Path) -> None:
    model, plain = teacher(tmp_path, "disk")
    ids = models.batch("llama", 0)["input_ids"][:, :4]
    given = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **given), plain.generate(ids, **given))  # type: ignore[operator]
    assert trace_of(model).spans
    close(model)


@pytest.mark.parametrize("weights", ("host", "disk"))
def test_of_few_tokens_only_the_experts_they_pick_are_fetched(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = teacher(tmp_path, weights, "mixtral")
    fetched: list[int] = []
    whole = PlacedStore.fetch

    def fetch(self: PlacedStore, unit: int, *args: Any, **given: Any) -> torch.Tensor:
        size = self.homes.units[unit].layout.weight_bytes
        fetched.append(sum(stop - start for start, stop in given.get("ranges") or [(0, size)]))
        if given.get("into") is None:
            slot = whole(self, unit, *args, **given)
            for name, param in weight_views(prepared(model).session.units[unit], slot).items():
                if "experts" in name and given.get("ranges"):
                    param.fill_(float("nan"))  # what is not picked is used for nothing
            return slot
        return whole(self, unit, *args, **given)

    monkeypatch.setattr(PlacedStore, "fetch", fetch)
    for token in range(3):
        ids = torch.tensor([[token]])
        fetched.clear()
        mask = torch.ones(1, 1, dtype=torch.int64)
        with torch.no_grad():
            found = model(input_ids=ids, attention_mask=mask).logits
            assert torch.equal(found, plain(input_ids=ids, attention_mask=mask).logits)
        assert 0 < sum(fetched) < 0.75 * prepared(model).weight_bytes
    batch = models.batch("mixtral", 0)
    with torch.no_grad():  # many tokens pick all experts: those are fetched ahead
        assert torch.equal(models.loss_of(model(**batch)), models.loss_of(plain(**batch)))
    close(model)


def test_a_forward_that_fails_or_calls_other_units_is_followed_by_right_ones(tmp_path: Path) -> None:
    model, plain = teacher(tmp_path, "disk")
    expected = outputs(plain, "llama")
    for _ in range(2):
        assert torch.equal(outputs(model, "llama"), expected)

    def fail(*_: object) -> None:
        raise RuntimeError("from a hook")

    hook = model.get_submodule("model.layers.2").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="from a hook"):
        outputs(model, "llama")
    hook.remove()
    assert torch.equal(outputs(model, "llama"), expected)
    for one in (model, plain):  # the second layer is left out
        layers = one.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        one.get_submodule("model").layers = nn.ModuleList([layers[0], *layers[2:]])
    for _ in range(3):
        assert torch.equal(outputs(model, "llama"), outputs(plain, "llama"))
    close(model)


def test_a_model_that_only_streams_says_so_when_it_should_be_trained(tmp_path: Path) -> None:
    model, _ = teacher(tmp_path, "host")
    with pytest.raises(spillway.UsageError, match="forwards alone"):
        model(**models.batch("llama", 0))
    with pytest.raises(spillway.UsageError, match="nothing was trained"):
        spillway.save_point(model)
    close(model)


def test_a_student_learns_from_a_teacher_that_streams(tmp_path: Path) -> None:
    large, plain_large = teacher(tmp_path / "teacher", "disk")
    weights = []
    for judge in (large, plain_large):
        torch.manual_seed(0)
        student = models.llama()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for number in range(3):
            batch = models.batch("llama", number)
            with torch.no_grad():
                wanted = judge(**batch).logits.softmax(-1)
            loss = nn.functional.cross_entropy(student(**batch).logits.flatten(0, 1), wanted.flatten(0, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights.append(torch.cat([param.detach().flatten() for param in student.parameters()]))
    assert torch.equal(weights[0], weights[1])
    close(large)


def test_what_streams_can_be_saved(tmp_path: Path) -> None:
    model, plain = teacher(tmp_path / "store", "disk")
    spillway.save_pretrained(model, tmp_path / "out")
    again = type(plain).from_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    assert all(torch.equal(left, right) for left, right in zip(plain.parameters(), again.parameters(), strict=True))
    assert torch.equal(outputs(model, "llama"), outputs(plain, "llama"))
    close(model)


def test_a_model_of_many_blocks_streams_before_any_batch_is_known(tmp_path: Path) -> None:
    plain = models.llama(blocks=30)
    expected = plain(**models.batch("llama", 0)).loss.detach()
    with torch.no_grad():
        streamed = spillway.stream(plain, store=tmp_path / "store", device="cpu")
        assert torch.equal(streamed(**models.batch("llama", 0)).loss, expected)
    spillway.close(streamed)


@pytest.mark.parametrize("weights", ("host", "disk"))
def test_memory_that_a_forward_in_inference_mode_took_serves_others_too(weights: str, tmp_path: Path) -> None:
    model, optimizer = spillway.prepare(
        models.llama(), spillway.AdamW(), device="cpu", store=tmp_path, weights=weights, states=weights
    )
    batch = models.batch("llama", 0)
    for inside in (torch.inference_mode, torch.no_grad):
        loss = model(**batch).loss
        with inside():
            between = model(**batch).loss  # beside the step, in memory of its own
        torch.testing.assert_close(between, loss.detach(), rtol=1e-5, atol=0)
        loss.backward()
        optimizer.step()
    close(model)
