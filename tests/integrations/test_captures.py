"""What transformers takes from within blocks, router logits and attention weights, may be a part of the loss."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters

LR = 1e-3


class Sharp(nn.Module):
    """A loss of the attention weights of all layers, in a module of its own around the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        output = self.inner(**batch, output_attentions=True, output_hidden_states=True)
        near = sum(weights.square().sum(-1).mean() for weights in output.attentions)
        return output.loss - near + output.hidden_states[1].square().mean()


def balanced_mixtral() -> nn.Module:
    model = models.mixtral()
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 0.5
    return model


def attending_llama() -> nn.Module:
    model = models.llama()
    model.set_attn_implementation("eager")
    return Sharp(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("activations", "micro_batch"), (("recompute", 2), ("tape", None), ("keep", None), ("disk", 2))
)
@pytest.mark.parametrize("make", (balanced_mixtral, attending_llama))
def test_a_loss_of_what_is_captured_trains_as_in_pytorch(
    make: object, activations: str, micro_batch: int | None, tmp_path: Path
) -> None:
    plain = make()  # type: ignore[operator]
    batches = [models.batch("mixtral", number) for number in range(3)]
    model, optimizer = spillway.prepare(
        copy.deepcopy(plain),
        spillway.AdamW(lr=LR, eps=reference.EPS),
        store=tmp_path,
        device="cpu",
        weights="disk",
        states="disk",
        activations=activations,
        micro_batch=micro_batch,
    )
    losses = []
    for batch in batches:
        loss = models.loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = reference.train(plain, [[batch] for batch in batches], LR, 1.0)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    trained = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(trained[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    close(model)
