"""Which calls of modules are under way, by the interpreter's own stack: no hook is told of those that Ctrl-C ends."""

import inspect

from torch import nn


def num_calls(module: nn.Module) -> int:
    """How many calls of the module this is within."""
    frame, calls = inspect.currentframe(), 0
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        calls += is_call and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls
