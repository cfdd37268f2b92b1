"""The random numbers that a run goes on with: PyTorch's, which models draw, and Python's and NumPy's, which data is
chosen with."""

import json
import random
import sys
from typing import Any

import torch


def states() -> dict[str, str]:
    """Of each generator, as text."""
    found = {"cpu": _hex(torch.get_rng_state()), "python": json.dumps(random.getstate())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = _hex(torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy"] = json.dumps(numpy.get_state(legacy=False), default=lambda array: array.tolist())
    return found


def go_on_from(found: dict[str, str]) -> None:
    """What `states` gave, here or in an earlier release; generators that one of them does not have are left alone."""
    torch.set_rng_state(_state(found["cpu"]))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(_state(found["cuda"]))
    if "python" in found:
        version, numbers, gauss = json.loads(found["python"])
        random.setstate((version, tuple(numbers), gauss))
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and "numpy" in found:
        numpy.set_state(json.loads(found["numpy"]))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
