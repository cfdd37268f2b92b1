"""The plan of one model on this machine."""

from pathlib import Path

import pytest
import torch
from torch import nn

import models
import spillway
from spillway import planner
from spillway.api import close, read_parameters
from spillway.assembly import prepared


def test_the_device_is_measured_with_calls_whatever_is_planned_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without calls, as where weights are looked at first, nobody knows how wide they are."""
    asked: list[tuple[int, int]] = []
    measure = planner.measure

    def noted(device: torch.device, dtype: torch.dtype, paths: tuple[Path, ...], rows: int, hidden: int, *more):  # type: ignore[no-untyped-def]
        asked.append((rows, hidden))
        return measure(device, dtype, paths, rows, hidden, *more)

    monkeypatch.setattr(planner, "measure", noted)
    model, _ = spillway.prepare(models.llama(), spillway.AdamW(lr=1e-3), store=tmp_path, device="cpu")
    read_parameters(model)
    assert asked == [(0, 0)]
    before = prepared(model).planner.hardware
    for length in (64, 8):
        model(**models.batch("llama", 0, rows=1, length=length)).loss.backward()
        prepared(model).session.settle()
        prepared(model).session.rounds.start_anew()
    assert [rows for rows, _ in asked] == [0, 64] and asked[1][1] > 0
    assert prepared(model).planner.hardware != before
    close(model)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 with an adapter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(64, 64, bias=False)
        self.adapter.weight = nn.Parameter(self.adapter.weight[:4].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (nn.functional.linear(x.float(), self.adapter.weight) @ self.adapter.weight).to(x.dtype)


@pytest.mark.parametrize("trained", (True, False))
def test_the_device_is_measured_in_the_dtype_that_it_computes_in(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []
    measure = planner.measure
    monkeypatch.setattr(
        planner, "measure", lambda device, dtype, *more: (asked.append(dtype), measure(device, dtype, *more))[1]
    )
    model: nn.Module = nn.Sequential(*[Adapted() for _ in range(3)])
    if trained:
        model, _ = spillway.prepare(model, device="cpu")
        model(torch.randn(2, 64).bfloat16()).sum().backward()
    else:
        model = spillway.stream(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).bfloat16(), device="cpu")
    assert set(asked) == {torch.bfloat16}
    close(model)
