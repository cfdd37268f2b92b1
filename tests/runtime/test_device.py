import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from spillway.runtime import device
from spillway.runtime.device import CpuDevice, CudaDevice
from spillway.spec.sizes import PAGE


def test_what_rests_on_the_cpu_as_device_lies_in_whole_pages_so_that_it_is_written_from_there() -> None:
    for size in (1, PAGE, 10 * PAGE + 64):
        buffer = CpuDevice().allocate(size)
        assert buffer.numel() == size and buffer.data_ptr() % PAGE == 0


class Stream:
    """In the place of a CUDA stream: writes down what it is told to wait for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self._said = said

    def wait_stream(self, other: "Stream") -> None:
        self._said.append(f"{self.name} waits for {other.name}")


class Event:
    """In the place of a CUDA event."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def record(self, stream: Stream) -> None:
        self._name = f"the end on {stream.name}"

    def synchronize(self) -> None:
        self._said.append(f"this thread waits for {self._name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams of a CUDA device are told, where there is none."""
    said: list[str] = []
    names = (f"stream {number}" for number in itertools.count(-len(device.STREAM_LANES)))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        said.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(next(names), said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("the user's", said))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(said))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    return said


def test_a_fork_waits_for_the_users_stream_and_the_users_for_it_whatever_happens_inside(streams: list[str]) -> None:
    cuda = CudaDevice()

    def fork() -> None:
        with cuda.fork(2) as beside:
            for number in range(3):
                with beside(number):
                    pass
            raise ValueError

    begun = ["stream 0 waits for the user's", "stream 1 waits for the user's"]
    over = ["the user's waits for stream 0", "the user's waits for stream 1"]
    ends = [f"this thread waits for the end on stream {number}" for number in (0, 1)]
    first, second = ["on stream 0", "on stream 1"], [ends[0], "on stream 0"]
    for computed in ([*first, *second], [ends[0], first[0], ends[1], first[1], *second]):  # the same streams again
        with pytest.raises(ValueError):
            fork()
        assert streams == [*begun, *computed, *over]
        streams.clear()
    with cuda.fork(1) as beside, beside(0):
        pass
    assert not streams
