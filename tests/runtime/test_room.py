"""Which errors are of memory."""

import pytest
import torch

from spillway.runtime.room import finding_room
from spillway.spec.errors import DeviceMemoryError, HostMemoryError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), DeviceMemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), DeviceMemoryError),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: tried to allocate 8 bytes."),
            HostMemoryError,
        ),
    ],
)
def test_errors_of_memory_name_what_met_them(error: RuntimeError, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="the embedding found no room") as told, finding_room("the embedding"):
        raise error
    assert told.value.__cause__ is error


def test_other_errors_stay_what_they_are() -> None:
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as found, finding_room("the embedding"):
        raise error
    assert found.value is error
