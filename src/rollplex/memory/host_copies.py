"""Tensors that are on the device or in host memory: put away, their device memory is really free.

GPU: pinned buffers and a stream of their own, so that copies run beside kernels; nothing blocks the calling thread.
CPU: the host copy is a mapped, unlinked temporary file, so that putting away frees memory there too and a plan can be
carried out, and checked, on any machine.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate

import torch

from rollplex.errors import StateError

_ALIGNMENT = 64  # bytes; of each storage's place in a mapped file, a multiple of every dtype's


class HostCopies:
    """Some tensors with storages of their own, moved together. Starts on the device.

    read_only: nobody writes them on the device, so the host copy, once made, stays valid and nothing is copied back.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], *, read_only: bool = False):
        """name: what they are, for errors. Raises StateError for a storage that cannot give its memory back."""
        self.name, self.read_only = name, read_only
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._tensors = tuple(tensors)
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        fixed = [storage for storage in self._storages if not storage.resizable()]
        if fixed:
            raise StateError(
                f"{name}: {len(fixed)} of {len(self._storages)} storages cannot be freed (they map a file); copy first"
            )
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host: list[torch.Tensor] | None = None
        self.on_device = True
        device = tensors[0].device if tensors else torch.device("cpu")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Of all storages."""
        return sum(self._sizes)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are exactly the tensors of this set."""
        return len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is one of this set."""
        return any(tensor is item for item in self._tensors)

    def put_away(self) -> None:
        """Copy to host memory, unless a valid copy is there, and free the device's. Kernels that were queued before are
        waited for by the copy, not by the caller. Raises StateError when it is away already."""
        self._require(on_device=True, move="put away")
        first = self._host is None
        if self._host is None:
            self._host = self._host_buffers()
        if first or not self.read_only:
            self._copy(to_host=True)
        for storage in self._storages:
            storage.resize_(0)
        self.on_device = False

    def bring_back(self) -> None:
        """Begin to bring the content back to the device; `wait` before it is used. Raises StateError when it is
        there."""
        self._require(on_device=False, move="bring back")
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self._copy(to_host=False)
        self.on_device = True

    def wait(self) -> None:
        """Kernels queued from now on find the content on the device."""
        self._require(on_device=True, move="use")
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)

    def wait_until_away(self) -> None:
        """Return when the copy to host memory has ended, so that the device memory can be given to others: until then
        a GPU's allocator holds it. Raises StateError when it is on the device."""
        self._require(on_device=False, move="wait for the departure of")
        if self._arrived is not None:
            self._arrived.synchronize()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, one of this set's, as its host copy holds it: of the same shape and dtype, not to be written.

        Raises StateError while the set is on the device: the copy may be old.
        """
        self._require(on_device=False, move="read on the host")
        assert self._host is not None  # it was put away
        if self._side is not None:
            self._side.synchronize()
        number = [storage._cdata for storage in self._storages].index(tensor.untyped_storage()._cdata)
        host = self._host[number].view(tensor.dtype)
        return host.as_strided(tensor.shape, tensor.stride(), host.storage_offset() + tensor.storage_offset())

    def _require(self, *, on_device: bool, move: str) -> None:
        if self.on_device is not on_device:
            raise StateError(f"cannot {move} {self.name}: it is {'on the device' if self.on_device else 'away'}")

    def _host_buffers(self) -> list[torch.Tensor]:
        """Host memory for each storage. Mapped by Python, not by torch, which would count it as memory of the device;
        one file for all, since each mapping holds a file descriptor."""
        if self._side is not None:
            return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in self._sizes]
        if not self._sizes:
            return []
        starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes), initial=0))
        try:
            with tempfile.TemporaryFile(prefix="rollplex-host-copy-") as file:  # the mapping outlives it
                os.posix_fallocate(file.fileno(), 0, starts[-1])  # a full disk is said here, not by a signal later
                whole = torch.frombuffer(mmap.mmap(file.fileno(), starts[-1]), dtype=torch.uint8)
        except OSError as error:
            raise StateError(
                f"{self.name} ({self.nbytes} bytes) cannot be put away on the disk of temporary files: {error}; make "
                "room there, set TMPDIR to another disk, or raise memory.cap_gib"
            ) from error
        return [whole[start : start + size] for start, size in zip(starts, self._sizes, strict=False)]

    def _copy(self, *, to_host: bool) -> None:
        assert self._host is not None  # made by the first put_away
        pairs = [
            (host, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            for host, storage in zip(self._host, self._storages, strict=True)
        ]
        if self._side is None:
            for host, here in pairs:
                (host if to_host else here).copy_(here if to_host else host)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for host, here in pairs:
                (host if to_host else here).copy_(here if to_host else host, non_blocking=True)
                here.record_stream(self._side)  # its memory is not reused before the copy has ended
            self._arrived = self._side.record_event()
