"""What a model is given for streaming, and gets back where that fails."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spillway.assembly import _move_buffers


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("none", None)


def device(name: str) -> Any:
    return SimpleNamespace(torch_device=torch.device(name))


def test_buffers_go_to_the_device_and_come_back() -> None:
    model = Counting()
    before = dict(model.named_buffers())
    back = _move_buffers(model, device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    back()
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def test_buffers_stay_where_not_all_of_them_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counting()
    before = dict(model.named_buffers())
    moves = iter((model.norm.running_mean,))

    def to(_: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved = next(moves, None)
        if moved is None:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return torch.empty_like(moved, device=device)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(Exception, match="the buffers of the model found no room for 2.00 GiB on the GPU"):
        _move_buffers(model, device("meta"))
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
