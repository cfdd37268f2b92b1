"""Memory that is not to be had, as errors that the user can mend."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spillway.spec.errors import DeviceMemoryError, HostMemoryError, SpillwayError

_WANTED = re.compile(r"allocate ([\d.]+ \w+)")
_CPU = "DefaultCPUAllocator"  # whose failures are plain RuntimeErrors
_GPU = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # and of what allocates beside PyTorch


def as_memory_error(error: RuntimeError, what: str) -> SpillwayError | None:
    """What the user is to hear of an error that `what` met; None where it is of something else than memory."""
    found = _WANTED.search(str(error))
    wanted = f" for {found[1]}" if found else ""
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _GPU):
        return DeviceMemoryError(
            f"{what} found no room{wanted} on the GPU: give a smaller device_memory, so that the plan leaves more "
            f"free, or end what else uses it"
        )
    if _CPU in str(error):
        return HostMemoryError(
            f"{what} found no room{wanted} in host memory: give a smaller host_memory, so that the plan leaves more "
            f"free, or end other programs"
        )
    return None


@contextmanager
def finding_room(what: str) -> Iterator[None]:
    """Memory that is not to be had within is such an error. Raises DeviceMemoryError and HostMemoryError."""
    try:
        yield
    except RuntimeError as error:
        told = as_memory_error(error, what)
        if told is None:
            raise
        raise told from error
