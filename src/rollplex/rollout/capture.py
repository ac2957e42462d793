"""A function of fixed buffers, recorded once and replayed: a CUDA graph, or on a CPU the call itself.

With runtime/device.py and memory/host_copies.py all there is of torch.cuda. A graph reads and writes the memory that
its function did, wherever that is: whoever moves a tensor must drop the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Capturer(Protocol):
    """Makes replays of one device. They share memory for what is inside, so only one may run at a time."""

    def captured(self, work: Work) -> Work:
        """`work`, which waits for nothing on the device and makes nothing that outlives it, to be called any number of
        times. It may be run meanwhile, so a second run must change nothing that the first did not."""

    def release(self) -> None:
        """Give the shared memory back, as soon as the replays are gone too."""


class Calls:
    """No recording: a CPU has nothing to gain from one."""

    def captured(self, work: Work) -> Work:
        """`work` itself."""
        return work

    def release(self) -> None:
        """Nothing is shared."""


class CudaGraphs:
    """Graphs of one GPU, with one pool of memory."""

    def __init__(self, device: torch.device):
        self.device = device
        # Its pool is the next one's. Held, since torch takes no pool whose graphs are all gone.
        self._newest: torch.cuda.CUDAGraph | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # to record on, by priority; few, each has a cuBLAS workspace

    def captured(self, work: Work) -> Work:
        """Run once on a stream aside, so that kernels are loaded and libraries have their workspaces; then record.

        Kernels of a graph keep the priority of the stream on which they were recorded, whatever stream it is launched
        on, so that one of the lane in use is taken (runtime/device.py: decoding's is high). Other lanes may go on
        meanwhile: errors of capture are those of this thread alone, and torch.cuda.graph is not used since it waits
        for the whole device and empties its cache, passes in the window included.
        """
        lane = torch.cuda.current_stream(self.device)
        priority = lane.priority
        if priority not in self._streams:
            self._streams[priority] = torch.cuda.Stream(self.device, priority=priority)
        side = self._streams[priority]
        side.wait_stream(lane)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            work()
            side.synchronize()
            pool = None if self._newest is None else self._newest.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it complains of what was recorded, and hides why
                    graph.capture_end()
                raise
            graph.capture_end()
        lane.wait_stream(side)
        self._newest = graph
        return graph.replay

    def release(self) -> None:
        """The next graph makes a pool of its own."""
        self._newest = None


def capturer_of(device: torch.device) -> Capturer:
    """The one of this device."""
    return CudaGraphs(device) if device.type == "cuda" else Calls()
