"""The random numbers that a run goes on with, as text: PyTorch's, which models draw, and Python's and NumPy's, which
data is chosen with."""

import json
from typing import Any

import torch

from spillway.runtime.calls import RngState, rng_state, set_rng_state


def states(device: torch.device) -> dict[str, str]:
    """Of each generator; of PyTorch's those of the CPU and of the device that units compute on."""
    now = rng_state(device)
    found = {"cpu": _hex(now.cpu), "python": json.dumps(now.python)}
    if now.device is not None:
        found["cuda"] = _hex(now.device)
    if now.numpy is not None:
        found["numpy"] = json.dumps(now.numpy, default=lambda array: array.tolist())
    return found


def go_on_from(found: dict[str, str], device: torch.device) -> None:
    """What `states` gave, here or in an earlier release, perhaps with another device; generators that one of them does
    not have are left alone."""
    now = rng_state(device)
    on_device = _state(found["cuda"]) if device.type == "cuda" and "cuda" in found else None
    python = _python(found["python"]) if "python" in found else now.python
    numpy = json.loads(found["numpy"]) if now.numpy is not None and "numpy" in found else now.numpy
    set_rng_state(device, RngState(_state(found["cpu"]), on_device, python, numpy))


def _python(text: str) -> tuple[Any, ...]:
    version, numbers, gauss = json.loads(text)
    return version, tuple(numbers), gauss


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
