"""One allocation of host memory that every buffer of ours comes from, and the slab pools cut from it."""

import mmap
import threading
from collections.abc import Collection
from contextlib import suppress

import torch

from spillway.spec.errors import HostMemoryError, invariant
from spillway.spec.plan import Op, Pool
from spillway.spec.sizes import PAGE, align, format_size


class Arena:
    """A page-aligned block of host memory; pages are taken from the system when first touched."""

    def __init__(self, num_bytes: int) -> None:
        """Raises HostMemoryError where there is not even the address space for it."""
        self.num_bytes = max(align(num_bytes, PAGE), PAGE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, self.num_bytes, flags=flags)
        except OSError as error:
            raise HostMemoryError(
                f"{format_size(self.num_bytes)} of host memory cannot be had ({error.strerror}): lower host_memory"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A child process (a data loader's worker) must not share pages that the drives write to.
            self._map.madvise(mmap.MADV_DONTFORK)
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int, owner: str) -> torch.Tensor:
        """A uint8 view of whole pages. Raises HostMemoryError naming `owner` when the arena is used up."""
        size = align(num_bytes, PAGE)
        if self._used + size > self.num_bytes:
            raise HostMemoryError(
                f"{owner} needs {format_size(size)} of host memory and {format_size(self.num_bytes - self._used)} "
                f"of the {format_size(self.num_bytes)} arena are left: raise host_memory"
            )
        view = self.buffer[self._used : self._used + size]
        self._used += size
        return view

    def mark(self) -> int:
        """The present end of use, for `reset_to`."""
        return self._used

    def reset_to(self, mark: int) -> None:
        """Take back everything allocated after `mark`; its pages stay, for what is allocated next."""
        self._used = mark

    def give_back(self, start: int, stop: int) -> None:
        """These bytes' pages are the system's again, and zero when they are next touched. Nothing may be allocated,
        pinned or registered there."""
        start = align(start, mmap.PAGESIZE)  # larger than ours on some machines
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


class SlabPools:
    """Free slabs of every pool of a plan. Leases of a pool are granted in the order of the operation list, which is
    what makes plans free of deadlock (see plan.check). A device slab carries the event after which it may be reused."""

    def __init__(self, pools: tuple[Pool, ...], buffers: dict[str, list[torch.Tensor]]) -> None:
        # With each the event that ends its last use, and that of the last work outside of lists.
        self._free: dict[str, list[tuple[torch.Tensor, object, object]]] = {
            pool.name: [(buffer, None, None) for buffer in buffers[pool.name]] for pool in pools
        }
        self._on_device = [pool.name for pool in pools if pool.tier == "device"]
        self._turns: dict[str, list[int]] = {}
        self._granted: dict[str, int] = {}
        self._leases: dict[str, tuple[str, torch.Tensor]] = {}
        self._keeps: frozenset[str] = frozenset()  # leases that the list leaves to the next one
        self._lock = threading.Lock()

    def holds(self, leases: Collection[str]) -> bool:
        """Whether the list before has left all of these."""
        with self._lock:
            return all(lease in self._leases for lease in leases)

    def start(self, ops: tuple[Op, ...], finds: Collection[str] = (), keeps: Collection[str] = ()) -> None:
        """Expect the leases of this list, in its order. `finds`: those of the list before that it begins with, all
        others are free again; `keeps`: those that it leaves to the next one."""
        with self._lock:
            outlived = self._leases.keys() - self._keeps
            invariant(not outlived, f"leases {sorted(outlived)} outlived their step")
            invariant(self._leases.keys() >= set(finds), "a list begins without what the one before should have left")
            for lease in self._leases.keys() - set(finds):
                pool, buffer = self._leases.pop(lease)
                self._free[pool].append((buffer, None, None))
            self._keeps = frozenset(keeps)
            self._turns = {name: [] for name in self._free}
            self._granted = dict.fromkeys(self._free, 0)
            for op in ops:
                for pool, _ in op.take:
                    self._turns[pool].append(op.id)

    def fence(self, event: object) -> None:
        """Device slabs may not be touched before this event: work outside the list may still use them."""
        with self._lock:
            for pool in self._on_device:
                self._free[pool] = [(buffer, last, event) for buffer, last, _ in self._free[pool]]

    def try_take(self, op: Op) -> list[object] | None:
        """Lease every slab the operation takes, or none. The events to wait for before the slabs are touched."""
        with self._lock:
            for pool, _ in op.take:
                if self._turns[pool][self._granted[pool]] != op.id or not self._free[pool]:
                    return None
            events: list[object] = []
            for pool, lease in op.take:
                buffer, *ends = self._free[pool].pop(0)  # the one whose events pass first
                self._granted[pool] += 1
                self._leases[lease] = (pool, buffer)
                events += ends
            return [event for event in events if event is not None]

    def buffer(self, lease: str) -> torch.Tensor:
        """The slab behind a lease, uint8."""
        with self._lock:
            return self._leases[lease][1]

    def give(self, op: Op, event: object) -> None:
        """Return the leases that end with this operation; `event`: when its device work is over."""
        with self._lock:
            for lease in op.give:
                pool, buffer = self._leases.pop(lease)
                self._free[pool].append((buffer, event, None))

    def abandon(self, event: object) -> None:
        """Take every lease back: the step was given up. `event`: when the work of it on the device is over."""
        with self._lock:
            for pool, buffer in self._leases.values():
                self._free[pool].append((buffer, event, None))
            self._leases.clear()
