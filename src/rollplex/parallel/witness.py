"""Who of a job has ended, and why: a rank that fails leaves a word where the others look when they lose it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

PATIENCE_S = 10.0  # a killed process loses its connections before it counts as ended: a moment, more on a busy host
_POLL_S = 0.05
_MOST_SHOWN = 400  # characters of an error


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A process of the job."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> Whereabouts:
        """Of this process."""
        return cls(socket.gethostname(), os.getpid())


@dataclass(frozen=True, slots=True)
class Witness:
    """Words of the dead in the job's key-value store, and whether processes of this host still run."""

    store: Any  # torch.distributed.Store
    rank: int
    ranks: Sequence[Whereabouts]

    def tell(self, error: BaseException) -> None:
        """Leave the reason why this rank ends. Never raises: the store may have gone with its own process."""
        first = (str(error).splitlines() or [""])[0][:_MOST_SHOWN]
        try:
            self.store.set(_key(self.rank), f"rank {self.rank} ended with {type(error).__name__}: {first}")
        except RuntimeError:
            return

    def told(self, wait_s: float = 0.0) -> str:
        """What became of the ranks that have ended; "" when nothing is known of any, `wait_s` seconds from now at the
        latest."""
        deadline = monotonic() + wait_s
        while not (found := [text for rank in range(len(self.ranks)) if (text := self._of(rank))]):
            if monotonic() >= deadline or len(self.ranks) == 1:
                return ""
            sleep(_POLL_S)
        return "; ".join(found)

    def _of(self, rank: int) -> str:
        if rank == self.rank:
            return ""
        try:
            if self.store.check([_key(rank)]):
                return str(self.store.get(_key(rank)).decode())
        except RuntimeError:  # the store's own process has ended
            pass
        place = self.ranks[rank]
        if place.host == self.ranks[self.rank].host and not _runs(place.pid):
            return f"rank {rank} (process {place.pid}) has ended without a word"
        return ""


def _key(rank: int) -> str:
    return f"rollplex/ended/{rank}"


def _runs(pid: int) -> bool:
    """Whether a process of this host lives. One that its parent has not asked about yet (a zombie) does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] not in ("Z", "X")
