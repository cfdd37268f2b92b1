"""What models and their users do around a head whose logits are not whole: as in plain PyTorch, or refused."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import models
import spillway
from spillway.assembly import prepared
from spillway.integrations import loss as chunked
from spillway.spec.errors import UsageError

LR = 0.1
SETTINGS = spillway.SGD(lr=LR, momentum=0.0, max_grad_norm=None)
Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked._LOGIT_BYTES, "cpu", 5 * 4 * models.VOCAB)  # five tokens


def of_class(kind: type) -> Any:
    model = models.llama()
    model.__class__ = kind
    return model


class Own(LlamaForCausalLM):
    """With a forward of its own, in two parts."""

    def hidden(self, batch: Batch) -> torch.Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return torch.as_tensor(self.model(input_ids=ids, attention_mask=mask).last_hidden_state)

    def output(self, logits: Any, labels: Any, **more: Any) -> CausalLMOutputWithPast:
        loss = None if labels is None else self.loss_function(logits, labels, models.VOCAB)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **more)


class InFloat32(Own):
    """Its head, whatever the autocast."""

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        hidden = self.hidden(batch)
        with torch.autocast("cpu", enabled=False):
            logits = self.lm_head(hidden.float())
        return self.output(logits, labels)


class WithoutGradient(Own):
    """Its head."""

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        hidden = self.hidden(batch)
        with torch.no_grad():
            logits = self.lm_head(hidden)
        found = self.output(logits, labels)
        found.loss = found.loss + hidden.square().mean()
        return found


class ByKeyword(Own):
    def forward(self, labels: Any = None, **batch: Any) -> Any:
        return self.output(self.lm_head(input=self.hidden(batch)), labels)


class AskingTwice(nn.Module):
    """A language model with labels, and again without them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.llama()

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> CausalLMOutputWithPast:
        loss = self.inner(labels=labels, **batch).loss
        return CausalLMOutputWithPast(loss=loss + 0.1 * self.inner(**batch).logits.square().mean())


class WithMore(Own):
    """In its output."""

    def forward(self, *args: Any, **batch: Any) -> Any:
        found = super().forward(*args, **batch)
        found["twice"] = 2 * found.loss
        found.note = "mine"
        return found


class Pair(NamedTuple):
    loss: Any
    logits: Any


class Named(Own):
    def forward(self, *args: Any, **batch: Any) -> Any:
        found = super().forward(*args, **batch)
        return Pair(found.loss, found.logits)


class Shifting(Own):
    """By slices, of whose rows none is left where they are one token long."""

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        logits = self.lm_head(self.hidden(batch))[..., :-1, :].contiguous()
        loss = nn.functional.cross_entropy(logits.view(-1, models.VOCAB), labels[..., 1:].reshape(-1))
        return CausalLMOutputWithPast(loss=loss)


def with_hooks(hook: str, found: list[Any]) -> Any:
    model = models.llama()
    doubles = lambda module, into, out: tuple(2 * grad for grad in into)  # noqa: E731
    notes = lambda module, args, output: found.append(type(output))  # noqa: E731
    getattr(model.lm_head, f"register_{hook}_hook")(doubles if "backward" in hook else notes)
    return model


def assert_trains_as_plain(plain: Any, step: Callable[[Any, Batch], torch.Tensor], num_steps: int = 2) -> None:
    ours, optimizer = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    own = torch.optim.SGD(plain.parameters(), lr=LR)
    for number in range(num_steps):
        batch = models.batch("llama", number)
        found, expected = step(ours, batch), step(plain, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        found.backward()
        optimizer.step()
        expected.backward()
        own.step()
        own.zero_grad()
    for name, weight in spillway.api.read_parameters(ours).items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-6, msg=name)
    spillway.close(ours)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    return torch.as_tensor(model(**batch).loss)


class InPlace(Own):
    """Scales its logits, which have another name, too."""

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        logits = same = self.lm_head(self.hidden(batch))
        same *= 0.5
        return self.output(logits, labels)


class Swallowing(Own):
    """What goes wrong with a further loss."""

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        logits = self.lm_head(self.hidden(batch))
        found = self.output(logits, labels)
        try:
            more = logits.square().mean()
        except Exception:
            more = 0
        found.loss = found.loss + 1e-3 * more
        return found


class BiasFirst(Own):
    def forward(self, labels: Any = None, **batch: Any) -> Any:
        return self.output(torch.linspace(0, 1, models.VOCAB) + self.lm_head(self.hidden(batch)), labels)


@pytest.mark.parametrize("kind", (WithoutGradient, ByKeyword, WithMore, Named, InPlace, Swallowing, BiasFirst))
def test_what_a_model_does_around_its_head_is_as_in_plain_pytorch(kind: type) -> None:
    assert_trains_as_plain(of_class(kind), loss_of)


def test_a_model_may_be_asked_with_labels_and_without_in_one_step() -> None:
    assert_trains_as_plain(AskingTwice(), loss_of)


@pytest.mark.parametrize("hook", ("forward", "full_backward"))
def test_hooks_of_the_head_see_tensors(hook: str) -> None:
    found: list[Any] = []
    assert_trains_as_plain(with_hooks(hook, found), loss_of)
    assert all(issubclass(kind, torch.Tensor) for kind in found)


def test_the_head_computes_in_the_autocast_that_it_is_called_in() -> None:
    plain = of_class(InFloat32)
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        batch = models.batch("llama", 0)
        torch.testing.assert_close(loss_of(model, batch), loss_of(plain, batch), rtol=1e-6, atol=0)
    spillway.close(model)


def is_in_pieces(model: Any) -> bool:
    return any(shape.kind == "LOSS" for shape in prepared(model).session.engine.in_force.shapes)


def test_labels_may_be_given_by_position() -> None:
    batch = models.batch("llama", 0)

    def step(model: Any, batch: Batch) -> torch.Tensor:
        return torch.as_tensor(
            model(batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"]).loss
        )

    assert_trains_as_plain(models.llama(), step)
    model, _ = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    step(model, batch)
    assert is_in_pieces(model)
    spillway.close(model)


class CalledTargets(Own):
    """What others call labels."""

    def forward(self, targets: Any = None, **batch: Any) -> Any:
        return self.output(self.lm_head(self.hidden(batch)), targets)


def test_smoothing_is_never_left_out_without_a_word() -> None:
    model, _ = spillway.prepare(of_class(CalledTargets), SETTINGS, device="cpu", label_smoothing=0.3)
    batch = models.batch("llama", 0)
    with pytest.raises(UsageError, match="label smoothing is not for CalledTargets"):
        model(targets=batch.pop("labels"), **batch)
    spillway.close(model)


def test_the_head_gives_logits_where_it_is_called_by_itself() -> None:
    plain = models.llama()
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    batch = models.batch("llama", 0)
    with torch.no_grad():
        expected = plain.lm_head(plain.model(batch["input_ids"]).last_hidden_state)  # type: ignore[union-attr,operator]
    loss_of(model, batch)
    with torch.no_grad():
        found = model.lm_head(model.model(batch["input_ids"]).last_hidden_state)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(found, expected)
    spillway.close(model)


def test_outputs_keep_what_is_not_logits() -> None:
    model, _ = spillway.prepare(of_class(WithMore), SETTINGS, device="cpu")
    found = model(**models.batch("llama", 0))
    assert (found.note, found.logits, "logits" in found) == ("mine", None, False)
    torch.testing.assert_close(found.twice, 2 * found.loss)
    spillway.close(model)
    model, _ = spillway.prepare(models.t5(), SETTINGS, device="cpu")
    batch = {**models.batch("t5", 0), "return_dict": False}
    found, expected = model(**batch), models.t5()(**batch)
    assert found[1] is None
    torch.testing.assert_close((found[0], found[-1]), (expected[0], expected[-1]))
    spillway.close(model)


def test_rows_of_which_nothing_is_trained_have_a_loss_of_nothing() -> None:
    model, _ = spillway.prepare(of_class(Shifting), SETTINGS, device="cpu")
    batch = {name: tensor[:, :1] for name, tensor in models.batch("llama", 0).items()}
    assert loss_of(model, batch).isnan()
    spillway.close(model)


class MoreLater(Own):
    """Does more with its logits when told to, and always when it is evaluated."""

    more = False

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        logits = self.lm_head(self.hidden(batch))
        found = self.output(logits, labels)
        if self.more:
            found.loss = found.loss + 1e-3 * logits.logsumexp(-1).square().mean()
        if not self.training:
            found["hits"] = (logits.argmax(-1) == labels).sum()
        return found


def test_a_model_that_does_more_with_its_logits_later_loses_one_batch_and_is_told() -> None:
    plain = of_class(MoreLater)
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu")
    batch = models.batch("llama", 0)
    torch.testing.assert_close(loss_of(model, batch), loss_of(plain, batch), rtol=1e-5, atol=0)
    model.more = plain.more = True
    with pytest.raises(UsageError, match=r"MoreLater does more with its logits \(logsumexp\) than when"):
        model(**batch)
    torch.testing.assert_close(loss_of(model, batch), loss_of(plain, batch), rtol=1e-5, atol=0)
    assert not is_in_pieces(model)
    spillway.close(model)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_an_evaluation_may_do_more_with_logits_than_a_step(smoothing: float) -> None:
    plain = of_class(MoreLater).eval()
    model, _ = spillway.prepare(copy.deepcopy(plain), SETTINGS, device="cpu", label_smoothing=smoothing)
    batch = models.batch("llama", 0)
    with torch.no_grad(), prepared(model).session.without_logits():
        found, expected = model(**batch), plain(**batch)
    assert found.hits == expected.hits and found.logits is None
    if not smoothing:
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    spillway.close(model)


class Penalised(Own):
    """Reads the weight of its head outside of its calls, which therefore stays on the device."""

    def forward(self, **batch: Any) -> Any:
        found = super().forward(**batch)
        found.loss = found.loss + 1e-3 * self.lm_head.weight.square().mean()
        return found


class Noisy(nn.Linear):
    """A head that draws."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(hidden, 0.3))


def test_a_head_that_stays_on_the_device_draws_once() -> None:
    plain = of_class(Penalised)
    plain.lm_head.__class__ = Noisy

    def step(model: Any, batch: Batch) -> torch.Tensor:
        torch.manual_seed(0)
        return loss_of(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked._LOGIT_BYTES, "cpu", 1 << 20)  # one piece: plain PyTorch draws for all rows at once
        assert_trains_as_plain(plain, step)


class PenalisedTwice(Own):
    """And does more with its logits."""

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        logits = self.lm_head(self.hidden(batch))
        found = self.output(logits, labels)
        found.loss = found.loss + 1e-3 * (self.lm_head.weight.square().mean() + logits.logsumexp(-1).square().mean())
        return found


def test_a_head_that_stays_on_the_device_may_give_whole_logits() -> None:
    assert_trains_as_plain(of_class(PenalisedTwice), loss_of)


def test_the_loss_of_a_head_that_stays_on_the_device_is_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_trains_as_plain(of_class(Penalised), loss_of)
    rows: list[int] = []
    apply_head = chunked.apply_head
    monkeypatch.setattr(chunked, "apply_head", lambda *args: (rows.append(len(args[2])), apply_head(*args))[1])
    model, _ = spillway.prepare(of_class(Penalised), SETTINGS, device="cpu")
    loss = loss_of(model, models.batch("llama", 0))
    rows.clear()
    loss.backward()
    assert rows and max(rows) <= 5, "computed again, a piece at a time"
    spillway.close(model)


class Keeping(Own):
    """Its logits, for whoever asks later."""

    def forward(self, *args: Any, **batch: Any) -> Any:
        found = super().forward(*args, **batch)
        self.kept = found.logits
        return found


def test_logits_that_were_kept_of_a_forward_with_labels_are_no_others() -> None:
    model, optimizer = spillway.prepare(of_class(Keeping), SETTINGS, device="cpu")
    loss_of(model, models.batch("llama", 0)).backward()
    optimizer.step()
    with torch.no_grad(), pytest.raises(UsageError, match=r"were kept and are used now \(argmax\): they were never"):
        model.kept.argmax(-1)  # type: ignore[union-attr,operator]
    spillway.close(model)


def test_a_hook_of_the_head_that_comes_later_costs_one_batch() -> None:
    model, _ = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    batch = models.batch("llama", 0)
    loss_of(model, batch)
    model.lm_head.register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr,operator]
    with pytest.raises(UsageError, match=r"does more with its logits \(a hook of the head\)"):
        loss_of(model, batch)
    loss_of(model, batch)
    assert not is_in_pieces(model)
    spillway.close(model)


def test_smoothing_ends_with_a_word_where_logits_are_whole_later() -> None:
    model, _ = spillway.prepare(of_class(MoreLater), SETTINGS, device="cpu", label_smoothing=0.3)
    batch = models.batch("llama", 0)
    loss_of(model, batch)
    model.more = True  # type: ignore[assignment]
    with pytest.raises(UsageError, match="does more with its logits"):
        loss_of(model, batch)
    model.more = False  # type: ignore[assignment]
    model.train()
    with torch.no_grad(), pytest.raises(UsageError, match="label smoothing is not for MoreLater"):
        loss_of(model, batch)
    with pytest.raises(UsageError, match="label smoothing is not for MoreLater"):
        loss_of(model, batch)
    spillway.close(model)


def test_two_models_may_have_one_head() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = models.llama(), models.llama()
            self.other.lm_head = self.one.lm_head

        def forward(self, **batch: torch.Tensor) -> CausalLMOutputWithPast:
            return CausalLMOutputWithPast(loss=self.one(**batch).loss + self.other(**batch).loss)

    assert_trains_as_plain(Two(), loss_of)


def test_an_evaluation_that_ctrl_c_ended_leaves_the_head_as_it_was() -> None:
    model, _ = spillway.prepare(models.llama(), SETTINGS, device="cpu")
    batch = models.batch("llama", 0)
    stop = model.model.norm.register_forward_hook(interrupt)  # type: ignore[union-attr]
    with torch.no_grad(), prepared(model).session.without_logits(), pytest.raises(KeyboardInterrupt):
        model(**batch)
    stop.remove()
    with torch.no_grad():
        hidden = model.model(batch["input_ids"]).last_hidden_state  # type: ignore[operator]
        assert isinstance(model.lm_head(hidden), torch.Tensor)  # type: ignore[operator]
    spillway.close(model)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
