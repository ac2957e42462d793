"""Who reads a model's weights now: a writer that starts beside a reader raises instead of corrupting what it reads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rollplex.errors import StateError


class WeightLease:
    """Counts readers by name; many may read, one may write, never both. Safe to call from any thread.

    Nothing waits here: a schedule's barriers make sure that readers are done before OPTIMIZER, and a lease that finds
    otherwise has found a fault of the schedule.

    Example:
        with lease.reading("decode"):
            ...
        with lease.writing("optimizer step 3"):
            ...
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._writer: str | None = None

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Hold the weights still for the block. Raises StateError while they are being written."""
        with self._lock:
            if self._writer is not None:
                raise StateError(f"{name} would read weights that {self._writer} is writing")
            self._readers[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[name] -= 1
                if not self._readers[name]:
                    del self._readers[name]

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Be the only one for the block. Raises StateError while anyone reads or writes."""
        with self._lock:
            if self._writer is not None or self._readers:
                holders = ", ".join(sorted(self._readers)) or self._writer
                raise StateError(f"{name} would write weights that {holders} still uses; wait for it to end")
            self._writer = name
        try:
            yield
        finally:
            with self._lock:
                self._writer = None
