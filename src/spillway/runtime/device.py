"""Everything that differs between a GPU and the CPU as the device, behind one interface."""

import ctypes
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import torch

from spillway.hardware.block import Block
from spillway.hardware.limits import process_bytes, trim_heap
from spillway.hardware.present import refuse_missing
from spillway.runtime.room import finding_room
from spillway.spec.options import check_device
from spillway.spec.sizes import PAGE, format_size

# Given the number of a micro-batch: the context to compute it in.
Beside = Callable[[int], AbstractContextManager[None]]


class Device(Protocol):
    """Where units compute. Events are opaque: made by `mark`, awaited by `settle` and `wait`."""

    kind: str
    torch_device: torch.device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer on the device."""

    def pin(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a host buffer fast to copy from and to, until the function that is returned is called."""

    def copy(self, lane: str, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to each first tensor from the second, on the lane's own stream; returns when all copies are over."""

    def lane(self, lane: str) -> AbstractContextManager[None]:
        """Operators inside run on the lane, and are over at its end."""

    def settle(self, events: list[object]) -> None:
        """Return when the events have passed."""

    def mark(self) -> object:
        """An event that passes when the compute submitted so far is over; None where it already is."""

    def wait(self, events: list[object]) -> None:
        """Let compute submitted from now on wait for the events."""

    def fork(self, count: int) -> AbstractContextManager[Beside]:
        """Micro-batches that are computed inside may run beside each other, so many at a time: all of them after what
        was submitted before, and before what is submitted afterwards. What one makes, nobody else may touch inside."""

    def take_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on compute uses what was made beside it."""

    def seconds_between(self, first: object, second: object) -> float | None:
        """Between two events that have passed; None where compute is over when its call returns."""

    def free_bytes(self) -> int | None:
        """Of the device's own memory; None where that is host memory."""

    def peak_bytes(self) -> int:
        """Most bytes the process has held on the device; 0 where that is host memory and counted there."""

    def make_room(self, work: int, most: int) -> None:
        """Before a call that takes `work` bytes: where host memory might pass `most` by it, give back what was freed by
        others and is still held."""


class CpuDevice:
    """The CPU as the device: lanes are threads, slots are ordinary memory within the device budget."""

    torch_device = torch.device("cpu")

    def __init__(self, kind: str = "cpu") -> None:
        """`kind`: where steps are only looked at, that of the device which will compute them."""
        self.kind = kind
        self._trimmed = 0  # bytes that the process took when the heap was last given back

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer of whole pages: what rests there is written to the drives from where it is."""
        pages = torch.empty(num_bytes + PAGE, dtype=torch.uint8, device="cpu")
        start = -pages.data_ptr() % PAGE
        return pages[start : start + num_bytes]

    def pin(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Nothing to do."""
        return lambda: None

    def copy(self, lane: str, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Plain copies."""
        for target, source in moves:
            target.copy_(source)

    def lane(self, lane: str) -> AbstractContextManager[None]:
        """The lane's thread computes."""
        return nullcontext()

    def settle(self, events: list[object]) -> None:
        """Nothing to wait for."""

    def mark(self) -> object:
        """Compute is over when its call returns."""
        return None

    def wait(self, events: list[object]) -> None:
        """Nothing to wait for."""

    def fork(self, count: int) -> AbstractContextManager[Beside]:
        """One after another, each on all cores."""
        return nullcontext(_in_turn)

    def take_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute made them."""

    def seconds_between(self, first: object, second: object) -> float | None:
        """The caller's clock tells."""
        return None

    def free_bytes(self) -> int | None:
        """Counted as host memory."""
        return None

    def peak_bytes(self) -> int:
        """Counted as host memory."""
        return 0

    def make_room(self, work: int, most: int) -> None:
        """What earlier calls have freed lies scattered in the heap, and tensors that fit nowhere in it come on top.
        Giving it back is not free (what is needed again comes page by page), so it is done where as much may be had by
        it as the call takes."""
        taken = process_bytes()
        if taken + work > most and taken - self._trimmed > work:
            trim_heap()
            self._trimmed = process_bytes()


def _in_turn(_: int) -> AbstractContextManager[None]:
    return nullcontext()


# Of a ring that copies go through where the buffer itself cannot be pinned; two chunks, so that the processor fills one
# while the link takes the other.
_CHUNK_BYTES = 16 << 20


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, whichever the user has made current


STREAM_LANES = ("upload", "download", "device")


class CudaDevice:
    """A CUDA device: one stream per copying lane, the user's current stream for compute."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in STREAM_LANES}
        self._beside: list[torch.cuda.Stream] = []
        self._over: dict[int, torch.cuda.Event] = {}  # the end of the last micro-batch on each of these
        self._pinned: dict[int, int] = {}  # address -> bytes
        self._rings: dict[str, list[torch.Tensor]] = {}
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer on the GPU. Not cut out of what is kept of others: that could not be given back then, and the
        budget would be overrun. Raises DeviceMemoryError."""
        torch.cuda.empty_cache()
        with finding_room(f"a buffer of {format_size(num_bytes)} that the plan asks for"):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def pin(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Register the pages with the driver, once and at their exact size. Where it refuses (a limit on locked memory)
        as much of the beginning as it takes; copies of the rest go through a small pinned ring."""
        address, wanted = buffer.data_ptr(), buffer.numel()
        size = wanted
        while size and int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) != 0:
            _forget_last_error()
            size = size // 2 // PAGE * PAGE
        if size < wanted:
            warnings.warn(
                f"the driver would pin only {format_size(size)} of {format_size(wanted)} of host memory, so copies to "
                "and from the GPU take a detour and more time than planned: raise the limit of locked memory "
                "(ulimit -l)",
                stacklevel=2,
            )
        if not size:
            return lambda: None
        self._pinned[address] = size

        def unpin() -> None:
            if self._pinned.pop(address, None) is not None:
                # An error of the device was raised where it struck; files and locks have still to be given back.
                with suppress(RuntimeError):
                    torch.cuda.synchronize(self.torch_device)
                torch.cuda.cudart().cudaHostUnregister(address)

        return unpin

    def copy(self, lane: str, moves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Blocks the lane's thread, once for all, not the GPU and not the interpreter."""
        stream = self._streams[lane]
        with self.lane(lane):
            for target, source in moves:
                host = source if target.is_cuda else target
                if host.is_cuda or self._is_pinned(host) or host.numel() * host.element_size() == 0:
                    target.copy_(source, non_blocking=True)
                else:
                    self._copy_through_ring(lane, stream, target, source)

    def lane(self, lane: str) -> AbstractContextManager[None]:
        """Operators inside run on the lane's stream, and are over at its end, however it ends. The lane `update` works
        on host memory."""
        return self._on_stream(self._streams[lane]) if lane in self._streams else nullcontext()

    @contextmanager
    def _on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        try:
            with torch.cuda.device(self.torch_device), torch.cuda.stream(stream):  # the thread may have another one
                yield
        finally:
            _pass(stream)

    def settle(self, events: list[object]) -> None:
        """Sleeps; a core that spins would be missing to the optimizer."""
        for event in events:
            event.synchronize()  # type: ignore[attr-defined]

    def _is_pinned(self, host: torch.Tensor) -> bool:
        start, size = host.data_ptr(), host.numel() * host.element_size()
        return any(at <= start and start + size <= at + length for at, length in self._pinned.items())

    def _copy_through_ring(
        self, lane: str, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor
    ) -> None:
        if lane not in self._rings:
            self._rings[lane] = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        ring = self._rings[lane]
        to, of = target.reshape(-1).view(torch.uint8), source.contiguous().reshape(-1).view(torch.uint8)
        upload = target.is_cuda
        pending: list[tuple[torch.cuda.Event, slice, torch.Tensor] | None] = [None, None]

        def settle(turn: int) -> None:
            waiting = pending[turn]
            if waiting is not None:
                event, part, chunk = waiting
                event.synchronize()
                if not upload:
                    to[part].copy_(chunk)
                pending[turn] = None

        for number, start in enumerate(range(0, of.numel(), _CHUNK_BYTES)):
            turn, part = number % 2, slice(start, min(start + _CHUNK_BYTES, of.numel()))
            settle(turn)
            chunk = ring[turn][: part.stop - part.start]
            if upload:
                chunk.copy_(of[part])
                to[part].copy_(chunk, non_blocking=True)
            else:
                chunk.copy_(of[part], non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            pending[turn] = (event, part, chunk)
        settle(0)
        settle(1)

    def mark(self) -> object:
        """An event on the stream the user computes on."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, events: list[object]) -> None:
        """Make the user's stream wait."""
        for event in events:
            torch.cuda.current_stream(self.torch_device).wait_event(event)  # type: ignore[arg-type]

    @contextmanager
    def fork(self, count: int) -> Iterator[Beside]:
        """A stream for each of so many micro-batches, which wait for the user's stream and which it then waits for
        (STRONGHOLD, multi-stream execution). Memory that is freed on a stream serves that stream again, after the next
        fork: by then the user's stream is done with it."""
        if count == 1:
            yield _in_turn
            return
        while len(self._beside) < count:
            _let_streams_differ()
            self._beside.append(torch.cuda.Stream(self.torch_device))
        streams, user = self._beside[:count], torch.cuda.current_stream(self.torch_device)
        for stream in streams:
            stream.wait_stream(user)
        try:
            yield lambda number: self._on(number % count)
        finally:
            for stream in streams:
                user.wait_stream(stream)

    @contextmanager
    def _on(self, number: int) -> Iterator[None]:
        """A micro-batch on that stream, when the one before it there is over: gradients that are summed on another
        stream are given back no sooner, and would fill the memory while this thread runs ahead."""
        if number in self._over:
            self._over[number].synchronize()
        with torch.cuda.stream(self._beside[number]):
            yield
        self._over[number] = torch.cuda.Event(blocking=True)
        self._over[number].record(self._beside[number])

    def take_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """They are the user's stream's, too, until it is done with them."""
        user = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            if tensor.is_cuda:  # a call may also give a count that is on the CPU
                tensor.record_stream(user)

    def seconds_between(self, first: object, second: object) -> float | None:
        """By the device's clock."""
        second.synchronize()  # type: ignore[attr-defined]
        milliseconds: float = first.elapsed_time(second)  # type: ignore[attr-defined]
        return milliseconds / 1000

    def free_bytes(self) -> int | None:
        """As the driver says, with what PyTorch keeps and does not use given back."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def peak_bytes(self) -> int:
        """What PyTorch's allocator had reserved at most since the device was opened: without the driver's own context,
        some hundred MB that are gone before anything is planned."""
        return torch.cuda.max_memory_reserved(self.torch_device)

    def make_room(self, work: int, most: int) -> None:
        """Nothing that computes is in host memory."""


def _let_streams_differ() -> None:
    """Gradients of weights are summed on one stream and found on several, as is meant: PyTorch (since 2.10) would warn
    of what that costs captured graphs."""
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if warn is not None:
        warn(False)


def _pass(stream: torch.cuda.Stream) -> None:
    """Return when what was submitted to the stream is over, without spinning."""
    over = torch.cuda.Event(blocking=True)
    over.record(stream)
    over.synchronize()


def _forget_last_error() -> None:
    """A refused registration must not surface at the next kernel launch. PyTorch does not offer this call. There may be
    several runtimes in the process; which of them refused is not told."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for library in {
        line.split(maxsplit=5)[5] for line in lines if "libcudart" in line and not line.endswith("(deleted)")
    }:
        ctypes.CDLL(library).cudaGetLastError()


def open_device(name: str) -> Device:
    """The device called 'auto', 'cpu', 'cuda' or 'cuda:1'. Raises UsageError where there is none of that name."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    refuse_missing(name)
    number = name.partition(":")[2]
    if number:
        torch.cuda.set_device(int(number))
    device = CudaDevice(torch.cuda.current_device())
    # Libraries and kernels that are loaded when they are first used, in this thread and autograd's: their memory is not
    # to be taken for free.
    Block(device.torch_device, torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16, 64, 256).step()
    return device
