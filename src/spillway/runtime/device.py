"""Everything that differs between a GPU and the CPU as the device, behind one interface."""

from typing import Protocol

import torch

from spillway.spec.errors import UsageError


class Device(Protocol):
    """Where units compute. Events are opaque: made by `mark`, awaited by `copy`."""

    kind: str
    torch_device: torch.device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer on the device."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Make a host buffer fast to copy from and to."""

    def copy(self, lane: str, target: torch.Tensor, source: torch.Tensor, after: list[object]) -> None:
        """Copy on the lane's own stream once every event of `after` has passed; returns when the copy is over."""

    def mark(self) -> object:
        """An event that passes when the compute submitted so far is over; None where it already is."""

    def wait(self, events: list[object]) -> None:
        """Let compute submitted from now on wait for the events."""

    def peak_bytes(self) -> int:
        """Most bytes the process has held on the device; 0 where that is host memory and counted there."""


class CpuDevice:
    """The CPU as the device: lanes are threads, slots are ordinary memory within the device budget."""

    kind = "cpu"
    torch_device = torch.device("cpu")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer, aligned for every kernel."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""

    def copy(self, lane: str, target: torch.Tensor, source: torch.Tensor, after: list[object]) -> None:
        """A plain copy; compute is synchronous, so there is never an event to wait for."""
        target.copy_(source)

    def mark(self) -> object:
        """Compute is over when its call returns."""
        return None

    def wait(self, events: list[object]) -> None:
        """Nothing to wait for."""

    def peak_bytes(self) -> int:
        """Counted as host memory."""
        return 0


class CudaDevice:
    """A CUDA device: one stream per copying lane, the user's current stream for compute."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in ("upload", "download")}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer on the GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def pin(self, buffer: torch.Tensor) -> None:
        """Register the pages with the driver, at their exact size; slower copies remain possible where it refuses."""
        if buffer.numel():
            torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)

    def copy(self, lane: str, target: torch.Tensor, source: torch.Tensor, after: list[object]) -> None:
        """Blocks the lane's thread, not the GPU and not the interpreter."""
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)  # type: ignore[arg-type]
            target.copy_(source, non_blocking=True)
            over = torch.cuda.Event()
            over.record(stream)
        over.synchronize()

    def mark(self) -> object:
        """An event on the stream the user computes on."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, events: list[object]) -> None:
        """Make the user's stream wait."""
        for event in events:
            torch.cuda.current_stream(self.torch_device).wait_event(event)  # type: ignore[arg-type]

    def peak_bytes(self) -> int:
        """What PyTorch's allocator had reserved at most."""
        return torch.cuda.max_memory_reserved(self.torch_device)


def open_device(name: str) -> Device:
    """The device called 'auto', 'cpu' or 'cuda'. Raises UsageError where there is none of that name."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    if name != "cuda":
        raise UsageError(f"the device '{name}' is not one of auto, cuda, cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "there is no CUDA device PyTorch can use here: choose --device cpu, or install a CUDA build of PyTorch"
        )
    return CudaDevice(torch.cuda.current_device())
