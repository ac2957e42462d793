"""Bytes that tensors hold over time, from the allocator's own events: what a memory plan is judged by.

torch's per-thread profiler reports every allocation and release that a thread makes, on the CPU as on a GPU. It knows
blocks from the moment it starts in that thread; what was there before is added once (`held_bytes`). This is not
resident-set size: pages that a library keeps for itself say nothing about a plan. Threads that nobody counts in (media,
rewards) are left out.
"""

from __future__ import annotations

import gc
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch

# The thread-local profiler: torch.profiler's own takes one thread only, and builds far more than these events.
from torch._C._autograd import ProfilerEvent, _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Bytes held as a step function: `level[i]` from `times_s[i]` (epoch seconds, as spans have) to the next."""

    times_s: tuple[float, ...]
    level: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once."""
        return max(self.level)

    @property
    def left_bytes(self) -> int:
        """What came and has not gone: after the first step of a run a few features at most, or something
        leaks."""
        return self.level[-1] - self.level[0]

    def peak_within(self, start_s: float, end_s: float) -> int:
        """Most bytes held at any time in [start_s, end_s]."""
        first = max(0, bisect_right(self.times_s, start_s) - 1)
        last = max(first + 1, bisect_left(self.times_s, end_s))
        return max(self.level[first:last])


class AllocationCounter:
    """Counts what threads allocate on one device while they say so (`counting`). Thread-safe.

    Example: with counter.counting(): work(); counter.trace().peak_bytes
    """

    def __init__(self, device: torch.device, held: Callable[[], int] = int, *, to_epoch_s: float = 0.0):
        """held: bytes held before anything is counted. to_epoch_s: what time.monotonic lacks to the clock of the spans
        that the trace is held against."""
        gc.collect()  # else a collection that comes upon older garbage later counts it as released, though never held
        self.device, self._base_bytes, self._to_epoch_s = device, held(), to_epoch_s
        self._began_s = time.monotonic() + to_epoch_s
        self._lock = threading.Lock()
        self._changes: list[tuple[float, int]] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the calling thread allocates and releases in this block. Not to be nested in one thread."""
        # Arguments: shapes off, memory on, stacks off, FLOPs off, modules off.
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        before_s = time.monotonic()
        _enable_profiler_legacy(config)
        try:
            yield
        finally:
            end_s = time.monotonic()
            changes = self._read(_disable_profiler_legacy(), before_s, end_s)
            with self._lock:
                self._changes += changes

    def trace(self) -> MemoryTrace:
        """All threads together, in the order of time."""
        with self._lock:
            changes = sorted(self._changes, key=lambda change: change[0])
        levels = accumulate((change for _, change in changes), initial=self._base_bytes)
        return MemoryTrace((self._began_s, *(moment for moment, _ in changes)), tuple(levels))

    def _read(self, threads: list[list[ProfilerEvent]], before_s: float, end_s: float) -> list[tuple[float, int]]:
        """Threads that autograd starts for a GPU are counted with the one that asked for the backward: they have lists
        of their own, and the marks of begin and end are in the list of the asking thread alone."""
        events = [event for each in threads for event in each]
        first, last = (next(e for e in events if e.name() == f"__{end}_profile") for end in ("start", "stop"))
        # It began after `before_s` and ended after `end_s`: at once, unless the system put the thread aside there.
        began_s = max(before_s, end_s - first.cpu_elapsed_us(last) * 1e-6) + self._to_epoch_s
        changes: list[tuple[float, int]] = []
        for event in events:
            if str(event.kind()) == "memory_alloc":
                on_gpu = self.device.type == "cuda"
                nbytes = event.cuda_memory_usage() if on_gpu else event.cpu_memory_usage()
                changes.append((began_s + first.cpu_elapsed_us(event) * 1e-6, nbytes))
        return [change for change in changes if change[1]]


def held_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages of `tensors` on `device`: for a CPU, whose allocator keeps no count. (Asking the garbage
    collector for all tensors there are breaks tuples that other threads are making.)"""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
