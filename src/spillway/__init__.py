"""Spillway: fine-tune every parameter of models that overflow your GPU.

model = spillway.load("DIR", AutoModelForCausalLM)
model, optimizer = spillway.prepare(model, spillway.AdamW(lr=2e-5), store="runs/a/store")
... the usual loop ...
spillway.save_pretrained(model, "out")
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "AdamW": "spillway.optim.config",
    "Lion": "spillway.optim.config",
    "SGD": "spillway.optim.config",
    "load": "spillway.api",
    "add_adapter": "spillway.api",
    "prepare": "spillway.api",
    "stream": "spillway.api",
    "save_pretrained": "spillway.api",
    "close": "spillway.api",
    "no_sync": "spillway.api",
    "save_point": "spillway.api",
    "KeepPoints": "spillway.spec.plan",
    "SpillwayError": "spillway.spec.errors",
    "PlanInfeasible": "spillway.spec.errors",
    "UsageError": "spillway.spec.errors",
    "DataError": "spillway.spec.errors",
    "DiskError": "spillway.spec.errors",
    "HostMemoryError": "spillway.spec.errors",
    "NonFinite": "spillway.spec.errors",
    "NothingSaved": "spillway.spec.errors",
    "Plan": "spillway.spec.plan",
    "predict": "spillway.planning.answer",
    "Trainer": "spillway.trainer",
    "TrainerMixin": "spillway.trainer",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    # Importing spillway imports neither torch nor transformers; using it does.
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'spillway' has no attribute '{name}'")
