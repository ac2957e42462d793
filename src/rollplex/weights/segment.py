"""Memory that several processes of one host map: of the host by a file without a name, of a CUDA device by IPC.

The kernel frees a segment with the last process that maps it, however that process ends: nothing is left behind.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rollplex.errors import StateError


@dataclass(frozen=True, slots=True)
class HostHandle:
    """What another process needs to map host memory: the owner's file descriptor, valid while the owner lives."""

    pid: int
    fd: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CudaHandle:
    """What another process needs to map CUDA memory: torch's IPC handle, as a function and its arguments."""

    rebuild: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


Handle = HostHandle | CudaHandle


class Segment:
    """`nbytes` of zeros at first, as a flat uint8 tensor that other processes may map too."""

    def __init__(self, memory: torch.Tensor, handle: HostHandle | None):
        self.memory, self._host = memory, handle
        if handle is not None:
            weakref.finalize(self, os.close, handle.fd)

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> Segment:
        """New memory. Raises StateError where the host cannot share memory (other systems than Linux)."""
        nbytes = max(1, nbytes)
        if device.type != "cpu":
            return cls(torch.zeros(nbytes, dtype=torch.uint8, device=device), None)
        fd = open_unnamed(nbytes)
        return cls(_mapped(fd, nbytes), HostHandle(os.getpid(), fd, nbytes))

    @property
    def handle(self) -> Handle:
        """For `attach` in another process; it can be pickled."""
        if self._host is not None:
            return self._host
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self.memory)
        return CudaHandle(rebuild, arguments)

    @classmethod
    def attach(cls, handle: Handle) -> Segment:
        """The same memory in this process. Raises StateError when its owner is gone."""
        if isinstance(handle, CudaHandle):
            return cls(handle.rebuild(*handle.arguments), None)
        fd = reopened(handle.pid, handle.fd)
        return cls(_mapped(fd, handle.nbytes), HostHandle(os.getpid(), fd, handle.nbytes))

    def synchronize(self) -> None:
        """Wait until everything that was written to it is there for others to see."""
        if self.memory.device.type != "cpu":
            torch.accelerator.synchronize(self.memory.device)


def open_unnamed(nbytes: int) -> int:
    """Descriptor of a new file in memory that has no name."""
    if not hasattr(os, "memfd_create"):
        raise StateError("weights can be shared between processes on Linux only: this system has no memfd_create")
    fd = os.memfd_create("rollplex")
    os.ftruncate(fd, nbytes)
    return fd


def reopened(pid: int, fd: int) -> int:
    """A descriptor of our own for a file that process `pid` has open. Raises StateError when that process is gone."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            f"shared weights of process {pid} cannot be mapped ({error}): it ended, or belongs to another user; "
            "start it again and take its new handle"
        ) from error


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    """The tensor keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
