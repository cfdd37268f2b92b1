"""The head and the loss in pieces: the loss and the gradients of the plain head, and no more memory than a piece."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import models
import spillway
from spillway.api import close
from spillway.assembly import prepared
from spillway.integrations import loss as chunked
from spillway.integrations.logits import DeferredLogits, ModelCall
from spillway.planning.profiler import ModelProfiler

LR = 0.1
SETTINGS = spillway.SGD(lr=LR, momentum=0.0, max_grad_norm=None)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked._LOGIT_BYTES, "cpu", 5 * 4 * models.VOCAB)  # five tokens


def masked() -> nn.Module:
    torch.manual_seed(0)
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=models.VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            attn_implementation="sdpa",
            reference_compile=False,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
        )
    )


def bart() -> nn.Module:
    """Its loss is its own, of logits to which it adds a constant of each word."""
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=models.VOCAB,
            d_model=32,
            max_position_embeddings=64,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            **{
                f"{side}_{what}": number
                for side in ("encoder", "decoder")
                for what, number in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
            },
        )
    )
    model.final_logits_bias.normal_()
    return model


def one_step(model: nn.Module, store: Path, **more: object) -> tuple[float, dict[str, torch.Tensor], bool]:
    """The loss, the weights after one plain SGD step, and whether the loss was in pieces."""
    model, optimizer = spillway.prepare(model, SETTINGS, store=store, device="cpu", **more)  # type: ignore[arg-type]
    loss = model(**models.batch("llama", 0)).loss
    loss.backward()
    optimizer.step()
    schedule = prepared(model).session.engine.schedule
    assert schedule is not None
    weights = {name: tensor.clone() for name, tensor in spillway.api.read_parameters(model).items()}
    close(model)
    return loss.item(), weights, any(shape.kind == "LOSS" for shape in schedule.shapes)


def assert_like(plain: nn.Module, loss: torch.Tensor, found: float, weights: dict[str, torch.Tensor]) -> None:
    loss.backward()
    torch.testing.assert_close(found, loss.item(), rtol=1e-5, atol=0)
    for name, param in plain.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(weights[name], param.detach() - LR * param.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", (models.llama, models.gemma2, models.mixtral, masked, models.t5, bart))
def test_the_loss_in_pieces_is_that_of_the_plain_head(make: object, tmp_path: Path) -> None:
    plain: nn.Module = make()  # type: ignore[operator]
    found, weights, in_pieces = one_step(copy.deepcopy(plain), tmp_path)
    assert in_pieces
    assert_like(plain, plain(**models.batch("llama", 0)).loss, found, weights)


def test_pieces_do_not_round_the_gradient_of_a_16_bit_head_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked._LOGIT_BYTES, "cpu", 4 * models.VOCAB)  # one token; of 4096 there are fewer pieces
    plain = models.llama().bfloat16()
    ids = torch.randint(models.VOCAB, (256, 16), generator=torch.Generator().manual_seed(0))
    lr = 1e5  # what is left of the old weights is nothing beside it
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain), spillway.SGD(lr=lr, momentum=0.0, max_grad_norm=None), store=tmp_path, device="cpu"
    )
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moved = spillway.api.read_parameters(model)["lm_head.weight"].float() - plain.lm_head.weight.detach().float()
    close(model)
    plain(input_ids=ids, labels=ids).loss.backward()
    grad = plain.lm_head.weight.grad
    assert grad is not None
    assert float((moved / -lr - grad.float()).norm() / grad.float().norm()) < 0.015


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", (models.llama, masked, models.t5))
def test_smoothed_labels_are_those_of_torch(make: object, tmp_path: Path) -> None:
    plain: nn.Module = make()  # type: ignore[operator]
    found, weights, in_pieces = one_step(copy.deepcopy(plain), tmp_path, label_smoothing=0.1)
    batch = models.batch("llama", 0)
    logits, labels = plain(**batch).logits, batch["labels"]
    if make is models.llama:
        logits, labels = logits[:, :-1], labels[:, 1:]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert in_pieces
    assert_like(plain, expected, found, weights)


def with_more_done_to_logits() -> nn.Module:
    plain = models.llama()
    plain.lm_head.register_forward_hook(lambda module, args, logits: logits - logits.mean(-1, keepdim=True))  # type: ignore[union-attr,operator]
    return plain


def test_smoothing_is_refused_where_the_loss_is_another(tmp_path: Path) -> None:
    for make in (models.two_lists, with_more_done_to_logits):
        with pytest.raises(spillway.UsageError, match="label smoothing is not for"):
            one_step(make(), tmp_path, label_smoothing=0.1)


@pytest.mark.parametrize("returns_dict", (True, False))
def test_an_evaluation_has_the_smoothed_loss_and_the_logits(returns_dict: bool) -> None:
    plain = models.t5().eval()
    batch = {**models.batch("t5", 0), "return_dict": returns_dict}
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu", label_smoothing=0.1)
    with torch.no_grad():
        found, logits = model(**batch)[:2]
        expected = plain(**batch)[1]
    torch.testing.assert_close(logits, expected)
    smoothed = nn.functional.cross_entropy(expected.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, smoothed)
    close(model)


def test_logits_stay_whole_where_a_model_does_more_with_them(tmp_path: Path) -> None:
    plain = with_more_done_to_logits()
    found, weights, in_pieces = one_step(copy.deepcopy(plain), tmp_path)
    assert not in_pieces
    assert_like(plain, plain(**models.batch("llama", 0)).loss, found, weights)


class Owner:
    """Of logits that are sums of hidden states, alike for every word but for what is done to them. `has_whole`: gives
    whole ones, too."""

    def __init__(self, has_whole: bool = False) -> None:
        self.has_whole = has_whole

    def whole(self, logits: DeferredLogits, wanted: str) -> torch.Tensor:
        if not self.has_whole:
            raise TypeError(wanted)
        return logits.applied(logits.hidden.sum(-1, keepdim=True).expand(*logits.shape))

    def loss(
        self, logits: DeferredLogits, targets: torch.Tensor, ignore_index: int, reduction: str, smoothing: float
    ) -> torch.Tensor:
        return nn.functional.cross_entropy(
            Owner(True).whole(logits, ""),
            targets,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=smoothing,
        )


def deferred(hidden: torch.Tensor, has_whole: bool = False) -> DeferredLogits:
    return DeferredLogits(hidden, 5, Owner(has_whole), nullcontext, ModelCall(True, True))


def test_deferred_logits_are_scaled_capped_and_shaped_like_logits() -> None:
    hidden, bias = torch.randn(2, 4, 3), torch.randn(1, 5)

    def used(logits: Any) -> Any:
        capped = 2 * torch.tanh((logits / 30.0).float() + bias) * 30.0
        return capped[..., :-1, :].contiguous().view(-1, logits.size(-1))

    whole = used(hidden.sum(-1, keepdim=True).expand(-1, -1, 5))
    found = used(deferred(hidden))
    assert (found.shape, found.size(), found.device) == (whole.shape, whole.size(), whole.device)
    targets = torch.tensor([0, 4, -100, 2, 1, 3])
    for loss in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum", ignore_index=4),
        nn.CrossEntropyLoss(label_smoothing=0.2),
    ):
        torch.testing.assert_close(loss(found, targets.clamp(min=0)), loss(whole, targets.clamp(min=0)))
    torch.testing.assert_close(nn.CrossEntropyLoss()(found, targets), nn.CrossEntropyLoss()(whole, targets))


ZEROS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    "other",
    (
        lambda logits: logits * torch.ones(5),
        lambda logits: logits / torch.ones(5),
        lambda logits: logits + torch.ones(4, 5),
        lambda logits: torch.ones(4, 5) + logits,
        lambda logits: logits + torch.ones(5, requires_grad=True),
        lambda logits: logits + 1.0,
        lambda logits: logits - logits.mean(-1, keepdim=True),
        lambda logits: 1 - logits,
        lambda logits: -logits,
        lambda logits: logits > 0,
        lambda logits: logits.logsumexp(-1),
        lambda logits: torch.softmax(logits, -1),
        lambda logits: torch.cat([logits]),
        lambda logits: logits[..., 0],
        lambda logits: logits[..., :3],
        lambda logits: logits.view(-1),
        lambda logits: logits.view(5, -1),
        lambda logits: torch.tensor(len(logits)),
        lambda logits: nn.CrossEntropyLoss(weight=torch.arange(5.0))(logits, ZEROS + 1),
        lambda logits: nn.CrossEntropyLoss(reduction="none")(logits, ZEROS),
        lambda logits: nn.CrossEntropyLoss()(logits, torch.ones(4, 5)),
        lambda logits: nn.CrossEntropyLoss()(torch.ones(4, 5), logits),
        lambda logits: nn.CrossEntropyLoss()(logits.view(2, 2, 5), torch.zeros(2, 5, dtype=torch.long)),
    ),
)
def test_whatever_else_is_done_to_deferred_logits_is_done_to_whole_ones(other: Callable[[Any], Any]) -> None:
    hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    whole = hidden.sum(-1, keepdim=True).repeat(1, 5)
    torch.testing.assert_close(other(deferred(hidden, has_whole=True)), other(whole))
    with pytest.raises(TypeError):
        other(deferred(hidden))


@pytest.mark.parametrize("kind", ("cpu", "cuda"))
@pytest.mark.parametrize("hidden", (256, 3584))
def test_a_vocabulary_of_256k_at_8k_tokens_takes_less_than_a_gigabyte(
    hidden: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    config = LlamaConfig(
        vocab_size=256_000,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(1, 8192, dtype=torch.int64)
    profile = ModelProfiler(model, kind).of({"input_ids": ids, "labels": ids}, None)
    head = next(call for call in profile.calls if call.kind == "LOSS")
    assert 0 < head.work_bytes < 10**9


class Weighted(nn.Module):
    """A module of one's own around a language model, which it asks twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        chosen = self.inner(**batch).loss
        return chosen - 0.1 * self.inner(**{**batch, "labels": batch["input_ids"]}).loss


@pytest.mark.usefixtures("small_pieces")
def test_the_loss_of_a_model_within_another_module_is_in_pieces(tmp_path: Path) -> None:
    plain = Weighted(models.llama())
    model, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, store=tmp_path, device="cpu")
    loss = model(**models.batch("llama", 0))
    loss.backward()
    optimizer.step()
    schedule = prepared(model).session.engine.schedule
    assert schedule is not None
    assert [shape.kind for shape in schedule.shapes].count("LOSS") == 2
    assert_like(plain, plain(**models.batch("llama", 0)), loss.item(), spillway.api.read_parameters(model))
    close(model)


class Cropped(nn.Module):
    """Takes so much of every row as it was told to, as one that begins with short texts. `looks`: at values, too."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.body, self.length, self.looks = models.llama(), 8, looks

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        length = self.length + (0 * int(input_ids.max()) if self.looks else 0)
        return torch.as_tensor(self.body(input_ids=input_ids[:, :length], labels=labels[:, :length]).loss)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.filterwarnings("ignore:.*works on larger tensors than when a batch of this shape was planned")
@pytest.mark.parametrize(("looks", "lengths"), ((False, (6, 16, 10)), (False, (16, 6, 12)), (True, (6, 16, 10))))
def test_every_token_counts_however_many_were_planned(looks: bool, lengths: tuple[int, ...]) -> None:
    plain = Cropped(looks)
    model, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    own = torch.optim.SGD(plain.parameters(), lr=LR)
    for step, length in enumerate(lengths):
        model.length = plain.length = length  # type: ignore[assignment]
        batch = models.batch("llama", step)
        loss, expected = model(**batch), plain(**batch)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        loss.backward()
        optimizer.step()
        expected.backward()
        own.step()
        own.zero_grad()
    assert any(shape.kind == "LOSS" for shape in prepared(model).session.engine.in_force.shapes)
    close(model)
