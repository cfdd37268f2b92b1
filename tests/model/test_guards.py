"""What cannot be asked of a model that streams is refused in a sentence, not in silence."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import models
import spillway
from spillway.spec.errors import UsageError


@pytest.fixture
def streaming() -> Iterator[nn.Module]:
    model, _ = spillway.prepare(models.llama(), device="cpu")
    yield model
    spillway.close(model)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (lambda model: model.to("cpu"), "cannot be moved or cast"),
        (lambda model: model.half(), "cannot be moved or cast"),
        (lambda model: model.state_dict(), "spillway.save_pretrained"),
        (lambda model: torch.save(model.state_dict(), io.BytesIO()), "spillway.save_pretrained"),
        (lambda model: model.save_pretrained("out"), "spillway.save_pretrained"),
        (lambda model: model.load_state_dict({}), "before spillway.prepare"),
        (lambda model: model.resize_token_embeddings(7), "before spillway.prepare"),
        (copy.deepcopy, "cannot be copied"),
        (lambda model: torch.save(model, io.BytesIO()), "cannot be copied"),
    ],
)
def test_what_a_model_that_streams_cannot_do(
    streaming: nn.Module, asked: Callable[[nn.Module], object], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        asked(streaming)


def test_freezing_a_parameter_too_late_is_not_passed_over(streaming: nn.Module) -> None:
    streaming.get_input_embeddings().requires_grad_(False)
    with pytest.raises(UsageError, match="requires_grad of model.embed_tokens.weight was changed after prepare"):
        streaming(**models.batch("llama", 0))


@pytest.mark.parametrize("register", ("register_hook", "register_post_accumulate_grad_hook"))
def test_a_hook_on_a_gradient_that_comes_too_late_is_not_passed_over(streaming: nn.Module, register: str) -> None:
    getattr(streaming.get_output_embeddings().weight, register)(lambda grad: None)
    with pytest.raises(UsageError, match="lm_head.weight was given a hook on its gradient after prepare"):
        streaming(**models.batch("llama", 0))


def test_a_parameter_that_is_replaced_too_late_is_not_passed_over(streaming: nn.Module) -> None:
    head = streaming.get_output_embeddings()
    head.weight = nn.Parameter(torch.zeros(head.out_features, head.in_features))
    with pytest.raises(UsageError, match="lm_head.weight was replaced by another parameter after prepare"):
        streaming(**models.batch("llama", 0))


def test_a_model_that_could_not_be_prepared_is_as_it_was() -> None:
    model = models.llama()
    kind = type(model)
    with pytest.raises(spillway.PlanInfeasible):
        spillway.prepare(model, device="cpu", host_memory="1MB", example=models.batch("llama", 0))
    assert type(model) is kind
    assert model.state_dict() and copy.deepcopy(model)
