"""A CUDA device made of threads, for machines without a GPU.

    make test-gpu        # SPILLWAY_EMULATED_GPU=1 python -m pytest -m gpu

It has streams, events, pinned host memory and memory of its own, and is as asynchronous as a GPU: operators are
launched, and computed later, stream by stream, with delays that differ. So it shows what a CPU as the device cannot:
tensors of two devices mixed, buffers that are used before a copy is over or given away before a kernel has read them,
memory that another stream still needs, events nobody waits for, backward in a thread of autograd's own. It shows
nothing of speed, nor what CUDA's own kernels do.

What PyTorch's C++ would provide is replaced (`torch._C._cuda_...`); its Python in `torch.cuda` is the real one.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

_HERE = Path(__file__).parent


class _StreamBase(torch.Stream):
    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
    ) -> "_StreamBase":
        if device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, device="cuda:0", priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


def install(memory: int = 8 << 30, delay_us: int = 5) -> Any:
    """Build it (a minute, once) and make it `torch.cuda`'s only device, of so many bytes; operations begin so much
    later, on average, those of some streams eight times as much, of others not at all. Returns its controls.
    Once a process, before CUDA is asked for anything, and only where PyTorch was built without."""
    build = Path(sys.prefix) / "emulated_gpu"
    build.mkdir(exist_ok=True)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ["PATH"]))  # where ninja may be
    device = cpp_extension.load(
        name="emulated_gpu",
        sources=[str(_HERE / "device.cpp")],
        extra_cflags=["-O1", "-g0"],
        build_directory=str(build),
    )
    device.set_memory(memory)
    device.set_delay(delay_us)
    _replace(device)
    return device


def _replace(device: Any) -> None:
    def memory_stats(_: int) -> dict[str, Any]:
        _, allocated, reserved, most_allocated, most_reserved = device.memory()
        both = (("allocated_bytes", allocated, most_allocated), ("reserved_bytes", reserved, most_reserved))
        return {name: {"all": {"current": now, "peak": peak}} for name, now, peak in both}

    def mem_get_info(_: int) -> tuple[int, int]:
        total, _, reserved, _, _ = device.memory()
        return total - reserved, total

    class EventBase:
        """Of those that are not made for timing, no time may be asked."""

        def __new__(cls, enable_timing: bool = False, **_: bool) -> "EventBase":
            event = super().__new__(cls)
            event._timed, event._event = enable_timing, device.Event()
            return event

        def record(self, stream: torch.Stream) -> None:
            self._event.record(stream.stream_id)

        def wait(self, stream: torch.Stream) -> None:
            self._event.wait(stream.stream_id)

        def query(self) -> bool:
            return self._event.query()

        def synchronize(self) -> None:
            self._event.synchronize()

        def elapsed_time(self, end: "EventBase") -> float:
            if not (self._timed and end._timed and self._event.query() and end._event.query()):
                raise RuntimeError("CUDA error: device not ready, or an event that was not made for timing")
            return self._event.elapsed_time(end._event)

    number = 1  # of c10::DeviceType::CUDA
    replaced = {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda index: None,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_getCurrentStream": lambda index: (device.current_stream(), 0, number),
        "_cuda_getCurrentRawStream": lambda index: device.current_stream(),
        "_cuda_getDefaultStream": lambda index: (0, 0, number),
        "_cuda_setStream": lambda stream_id, device_index, device_type: device.set_stream(stream_id),
        "_cuda_synchronize": device.synchronize,
        "_cuda_emptyCache": device.empty_cache,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda index: device.reset_peaks(),
        "_cuda_setMemoryFraction": lambda fraction, index: device.set_memory(int(fraction * device.memory()[0])),
        "_cuda_sleep": lambda cycles: device.sleep(cycles / 1e9),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_CudaStreamBase": _StreamBase,
        "_CudaEventBase": EventBase,
        "_has_cuda": True,
    }
    for name, value in replaced.items():
        setattr(torch._C, name, value)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "12.8"
    cuda = torch.cuda
    cuda._cudart = SimpleNamespace(
        cudaMemGetInfo=mem_get_info,
        cudaHostRegister=lambda address, size, flags: device.host_register(address, size),
        cudaHostUnregister=device.host_unregister,
    )
    cuda.default_generators = (device.default_generator(),)
    properties = SimpleNamespace(
        name="emulated GPU", major=9, minor=0, total_memory=device.memory()[0], multi_processor_count=2
    )
    cuda._get_device_properties = lambda index: properties
    cuda._is_in_bad_fork = lambda: False
    cuda._exchange_device = cuda._maybe_exchange_device = lambda index: 0
    streams = importlib.reload(importlib.import_module("torch.cuda.streams"))
    cuda.Stream, cuda.Event, cuda.ExternalStream = streams.Stream, streams.Event, streams.ExternalStream
