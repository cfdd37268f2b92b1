"""How host memory is pinned, and copied where it cannot be: the driver is stood in for, as there may be none."""

import warnings
from typing import Any

import pytest
import torch

from spillway.runtime import device as device_module
from spillway.runtime.device import CudaDevice
from spillway.spec.sizes import PAGE


class Driver:
    """Pins no more than so many bytes at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if size > self.most:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Event:
    """Tells how many were recorded and not waited for."""

    pending = most_pending = 0

    def __init__(self, **_: Any) -> None:
        self.is_recorded = False

    def record(self, _: Any) -> None:
        Event.pending += 1
        Event.most_pending = max(Event.most_pending, Event.pending)
        self.is_recorded = True

    def synchronize(self) -> None:
        Event.pending -= self.is_recorded
        self.is_recorded = False


class OnCuda(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    found: CudaDevice = object.__new__(CudaDevice)
    found.torch_device = torch.device("cuda", 0)
    found._pinned, found._rings = {}, {}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(device_module, "_forget_last_error", lambda: None)
    Event.pending = Event.most_pending = 0
    return found


def test_memory_is_registered_once_and_at_its_exact_size(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(1 << 40)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer = torch.empty(37 * PAGE, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unpin = cuda.pin(buffer)
    assert driver.registered == {buffer.data_ptr(): 37 * PAGE} and driver.calls == 1
    assert cuda._is_pinned(buffer) and cuda._is_pinned(buffer[5:9])
    unpin()
    unpin()  # a second time does nothing
    assert not driver.registered and not cuda._is_pinned(buffer)


def test_where_little_can_be_pinned_as_much_of_the_beginning_is(
    cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(20 * PAGE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    buffer = torch.empty(64 * PAGE, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="would pin only 65.54 kB of 262.14 kB"):
        unpin = cuda.pin(buffer)
    assert driver.registered == {buffer.data_ptr(): 16 * PAGE}
    assert cuda._is_pinned(buffer[: 16 * PAGE]) and not cuda._is_pinned(buffer[15 * PAGE : 17 * PAGE])
    unpin()
    driver.most = 0
    with pytest.warns(UserWarning, match="would pin only 0 B"):
        cuda.pin(buffer)()
    assert not driver.registered and not cuda._is_pinned(buffer)


@pytest.mark.parametrize("upload", (False, True))
@pytest.mark.parametrize("size", (1, 1000, 4096, 9001))
def test_what_is_not_pinned_is_copied_through_two_chunks_in_turn(
    cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch, upload: bool, size: int
) -> None:
    monkeypatch.setattr(device_module, "_CHUNK_BYTES", 4096)
    cuda._rings["upload"] = [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
    source, target = torch.randn(size), torch.zeros(size)
    there = target.as_subclass(OnCuda) if upload else target
    cuda._copy_through_ring("upload", None, there, source)  # type: ignore[arg-type]
    assert torch.equal(target, source)
    assert Event.pending == 0 and Event.most_pending == min(2, -(-4 * size // 4096))
