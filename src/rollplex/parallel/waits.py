"""Every wait for another process has a deadline, and an error that says what was waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar

import torch.distributed as dist

from rollplex.errors import DeadlineError, PeerError
from rollplex.parallel.witness import PATIENCE_S, Witness

T = TypeVar("T")
_COMMUNICATION = ("gloo", "nccl", "peer", "connect", "socket", "store", "process group", "timed out", "timeout")


@dataclass(frozen=True, slots=True)
class Peers:
    """A process group, this process's place in it, how long to wait for the others (seconds), and who can say what
    became of them."""

    group: Any  # torch.distributed.ProcessGroup
    name: str  # for messages, such as "training's tensor-parallel ranks"
    deadline_s: float
    witness: Witness | None = None

    @property
    def rank(self) -> int:
        """Place in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def wait(self, work: Any, what: str) -> None:
        """Until `work` is done. Raises DeadlineError or PeerError, which name `what` and the group."""
        with self.waiting(what):
            work.wait(timedelta(seconds=self.deadline_s))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn what torch.distributed raises in the block into errors that say what was waited for. What has nothing
        to do with other ranks, such as memory that does not suffice here, comes through as it is."""
        began = monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, (DeadlineError, PeerError)) or not _of_communication(error):
                raise
            waited, where = monotonic() - began, f"rank {self.rank} of {self.size} of {self.name}"
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise DeadlineError(
                    f"{what}: {where} waited {waited:.1f} s for the other ranks{self._told()}; look for the first "
                    "error among them"
                ) from error
            told = self._told(PATIENCE_S)
            raise PeerError(
                f"{what}: {where} lost another rank after {waited:.1f} s ({_first_line(error)}){told}; look for the "
                "first error among them, then start the job again from its last checkpoint"
            ) from error

    def barrier(self, what: str) -> None:
        """Until all ranks are here."""
        with self.waiting(what):
            work = dist.barrier(self.group, async_op=True)
            work.wait(timedelta(seconds=self.deadline_s))

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Small Python objects of all ranks, in rank order."""
        found: list[Any] = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, value: T, what: str) -> T:
        """A small Python object as the group's first rank has it."""
        found: T = self.exchange(value if self.rank == 0 else None, what)[0]
        return found

    def _told(self, wait_s: float = 0.0) -> str:
        told = self.witness.told(wait_s) if self.witness is not None else ""
        return f": {told}" if told else ""


def _of_communication(error: Exception) -> bool:
    """gloo and NCCL raise plain RuntimeError and ValueError, which their messages alone tell from others."""
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _COMMUNICATION)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
