"""Compiled blocks stream as compiled blocks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import reference
import spillway
from spillway.api import close, read_parameters


class Counting:
    """A backend of torch.compile that runs graphs as they are."""

    graphs = runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.mark.parametrize(("activations", "runs"), (("recompute", 2), ("keep", 1)))
def test_compiled_blocks_run_their_graphs_and_equal_plain_pytorch(activations: str, runs: int, tmp_path: Path) -> None:
    torch._dynamo.reset()
    plain, count = models.llama(), Counting()
    model = copy.deepcopy(plain)
    layers = [
        module for name, module in model.named_modules() if name.startswith("model.layers.") and name[-1].isdigit()
    ]
    for layer in layers:
        layer.compile(backend=count)
    settings = spillway.AdamW(lr=1e-3, eps=reference.EPS)
    model, optimizer = spillway.prepare(
        model, settings, store=tmp_path, device="cpu", weights="disk", states="disk", activations=activations
    )
    batches = [[models.batch("llama", number)] for number in range(3)]
    for (batch,) in batches:
        model(**batch).loss.backward()
        optimizer.step()
    assert count.graphs == 1 and count.runs == 3 * len(layers) * runs
    reference.train(plain, batches, 1e-3, 1.0)
    weights = read_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-5, atol=1e-5, msg=name)
    close(model)


@pytest.mark.parametrize("part", ("mlp", "forward"))
def test_blocks_that_are_compiled_in_part_run_what_was_compiled(part: str) -> None:
    """Whatever a plan without them would choose to keep: what is recorded operator by operator is not compiled."""
    torch._dynamo.reset()
    model, count = models.llama(), Counting()
    for layer in model.model.layers:
        if part == "mlp":
            layer.mlp.compile(backend=count)
        else:
            layer.forward = torch.compile(layer.forward, backend=count)
    with pytest.raises(spillway.UsageError, match="compiled"):
        spillway.prepare(model, spillway.AdamW(), device="cpu", activations="tape")
    model, optimizer = spillway.prepare(model, spillway.AdamW(), device="cpu")
    model(**models.batch("llama", 0)).loss.backward()
    optimizer.step()
    close(model)
    assert count.runs >= len(model.model.layers)


def test_what_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    whole, wrapped, taped = models.two_lists(), models.two_lists(), models.two_lists()
    whole.compile()
    wrapped.first[0] = torch.compile(wrapped.first[0])  # type: ignore[index,union-attr,operator]
    for model in (whole, torch.compile(models.two_lists()), wrapped):
        with pytest.raises(spillway.UsageError, match=r"block\.compile\(\)"):
            spillway.prepare(model, store=tmp_path, device="cpu")  # type: ignore[arg-type]
    for block in taped.first:  # type: ignore[union-attr]
        assert isinstance(block, nn.Module)
        block.compile(backend=Counting())
    with pytest.raises(spillway.UsageError, match="not compiled"):
        spillway.prepare(taped, store=tmp_path, device="cpu", activations="tape")


@pytest.mark.parametrize("architecture", ("llama", "two_lists"))
def test_a_streaming_model_that_is_compiled_afterwards_is_refused(architecture: str) -> None:
    plain = models.two_lists() if architecture == "two_lists" else models.llama()
    model, _ = spillway.prepare(plain, device="cpu")
    compiled = torch.compile(model, backend=Counting())
    with pytest.raises(spillway.UsageError, match=r"block\.compile\(\)"):
        compiled(**models.batch(architecture, 0))
    with pytest.raises(spillway.UsageError, match=r"block\.compile\(\)"), torch.no_grad():
        compiled(**models.batch(architecture, 0))
    close(model)
