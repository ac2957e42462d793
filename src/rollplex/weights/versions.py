"""The version of weights that several processes read and one writes, and who may do so now.

Readers and the writer hold a lock of the operating system (flock), which dies with its process. What survives is the
state beside it: a writer marks the weights as half written before its first byte and as a new version after its last,
so whoever comes after one that was killed finds weights that nobody may read until all of them are written again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep

from rollplex.errors import DeadlineError, StateError, TrainingError
from rollplex.weights.segment import open_unnamed, reopened

_WORDS = struct.Struct("qqq")  # version, 1 while half written, process id of the last writer
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class VersionHandle:
    """What another process needs to join; valid while process `pid` lives."""

    pid: int
    fd: int
    gate_fd: int


class SharedVersion:
    """Version counter of one backing. Starts at 0 and half written: the weights must be loaded first.

    Safe to use from any thread and from every process that attached it. A writer that waits holds the gate that every
    reader must pass, so that readers which follow one another do not keep it waiting.
    """

    def __init__(self, fd: int, gate_fd: int):
        self._fd, self._gate_fd, self._words = fd, gate_fd, mmap.mmap(fd, _WORDS.size)
        self._holders: list[str] = []  # of this process, for messages
        self._mutex = threading.Lock()
        for descriptor in (fd, gate_fd):
            weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls) -> SharedVersion:
        """A counter that `attach` can join from other processes."""
        version = cls(open_unnamed(_WORDS.size), open_unnamed(1))
        version._set(0, half_written=True)
        return version

    @classmethod
    def attach(cls, handle: VersionHandle) -> SharedVersion:
        """The counter of another process. Raises StateError when that process is gone."""
        return cls(reopened(handle.pid, handle.fd), reopened(handle.pid, handle.gate_fd))

    @property
    def handle(self) -> VersionHandle:
        """For `attach`; it can be pickled."""
        return VersionHandle(os.getpid(), self._fd, self._gate_fd)

    @property
    def current(self) -> int:
        """Writes completed so far."""
        return self._get()[0]

    @property
    def readable(self) -> bool:
        """Whether the weights are whole: loaded, and not half written."""
        return not self._get()[1]

    @contextmanager
    def reading(self, who: str, *, wait_s: float = 0.0) -> Iterator[int]:
        """Hold the weights still for the block; yields their version.

        Raises DeadlineError when a writer has them for longer than `wait_s`, StateError when they are half written.
        """
        with self._locked(fcntl.LOCK_SH, who, "read", wait_s):
            version, half_written, writer = self._get()
            if half_written:
                raise StateError(_half_written(who, version, writer))
            yield version

    @contextmanager
    def writing(self, who: str, *, wait_s: float = 0.0, replaces_all: bool = False) -> Iterator[int]:
        """Be the only one for the block; yields the version that its end makes.

        A block that fails leaves half-written weights, save with TrainingError, which says that none was changed.
        replaces_all: the block writes every weight, so that half-written ones may be there at its start. Raises
        DeadlineError when readers or another writer have the weights for longer than `wait_s`.
        """
        with self._locked(fcntl.LOCK_EX, who, "write", wait_s):
            version, half_written, writer = self._get()
            if half_written and not replaces_all:
                raise StateError(_half_written(who, version, writer))
            self._set(version, half_written=True)
            try:
                yield version + 1
            except TrainingError:
                self._set(version, half_written=bool(half_written))
                raise
            self._set(version + 1, half_written=False)

    @contextmanager
    def _locked(self, kind: int, who: str, verb: str, wait_s: float) -> Iterator[None]:
        """flock on descriptions of our own: they then hold against other threads as against other processes."""
        deadline = monotonic() + wait_s
        gate, fd = reopened(os.getpid(), self._gate_fd), reopened(os.getpid(), self._fd)
        try:
            for part in (gate, fd):
                while not _taken(part, kind):
                    if monotonic() >= deadline:
                        raise DeadlineError(
                            f"{who} waited {wait_s:.1f} s to {verb} the weights, which {self._others()} hold; "
                            "let them end first"
                        )
                    sleep(_POLL_S)
            fcntl.flock(gate, fcntl.LOCK_UN)
            with self._mutex:
                self._holders.append(who)
            try:
                yield
            finally:
                with self._mutex:
                    self._holders.remove(who)
        finally:
            os.close(gate)
            os.close(fd)

    def _others(self) -> str:
        """Who holds the lock, as well as the system tells: names in this process, numbers of others."""
        with self._mutex:
            names = list(self._holders)
        inode = os.fstat(self._fd).st_ino
        try:
            with open("/proc/locks", encoding="ascii") as file:
                fields = [line.split() for line in file]
        except OSError:
            fields = []
        pids = {int(f[4]) for f in fields if f[1] == "FLOCK" and f[5].rsplit(":", 1)[-1] == str(inode)}
        names += [f"process {pid}" for pid in sorted(pids - {os.getpid()})]
        return ", ".join(names) or "another process"

    def _get(self) -> tuple[int, int, int]:
        version, half_written, writer = _WORDS.unpack(self._words[: _WORDS.size])
        return version, half_written, writer

    def _set(self, version: int, *, half_written: bool) -> None:
        self._words[: _WORDS.size] = _WORDS.pack(version, half_written, os.getpid())


def _taken(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _half_written(who: str, version: int, writer: int) -> str:
    return (
        f"{who} needs whole weights; these were not loaded, or are half written since v{version} (last by process "
        f"{writer}). Load all of them, from the last checkpoint"
    )
