"""Which residency moves are legal, as a state machine that refuses the others with StateError. Thread-safe.

Two objects have residency: the policy's weights and the rollout KV cache. Each is
    RESIDENT --offload--> OFFLOADED --wake--> RESIDENT          content kept in host memory
    RESIDENT --release--> RELEASED  --wake--> RESIDENT          content dropped; weights must then be loaded before use
Readers (decoding, prefix and response passes) hold the weights while they run; a writer (optimizer, publish) needs them
alone and makes a new version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from rollplex.errors import StateError, TrainingError


class Residency(StrEnum):
    """Where an object's bytes are."""

    RESIDENT = "resident"
    OFFLOADED = "offloaded"
    RELEASED = "released"


class ResidencyStates:
    """Residency of weights and KV cache, their readers and their writer. Starts resident, with valid weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = {"weights": Residency.RESIDENT, "kv": Residency.RESIDENT}
        self._valid = True  # the weights' memory holds weights
        self._readers: list[str] = []  # all that read weights, those that generate included
        self._generators: list[str] = []
        self._writer: str | None = None
        self._version = 0

    @property
    def weights(self) -> Residency:
        """Where the weights are."""
        with self._lock:
            return self._at["weights"]

    @property
    def kv(self) -> Residency:
        """Where the KV cache is."""
        with self._lock:
            return self._at["kv"]

    @property
    def version(self) -> int:
        """Writes completed so far."""
        with self._lock:
            return self._version

    def offload_weights(self) -> None:
        """Weights to host memory."""
        self._sleep("weights", Residency.OFFLOADED)

    def release_weights(self) -> None:
        """Drop the weights; after waking they must be loaded again."""
        self._sleep("weights", Residency.RELEASED)

    def wake_weights(self) -> None:
        """Bring the weights back, or give them memory that waits to be loaded."""
        self._wake("weights")

    def offload_kv(self) -> None:
        """KV cache to host memory."""
        self._sleep("kv", Residency.OFFLOADED)

    def release_kv(self) -> None:
        """Drop the KV cache."""
        self._sleep("kv", Residency.RELEASED)

    def wake_kv(self) -> None:
        """Bring the KV cache back, or an empty one."""
        self._wake("kv")

    @contextmanager
    def generating(self, who: str) -> Iterator[int]:
        """A reader that decodes: it needs weights and KV cache. Yields the version it reads."""
        with self._lock:
            if self._at["kv"] is not Residency.RESIDENT:
                raise StateError(f"{who} cannot generate while the KV cache is {self._at['kv']}; wake it first")
            version = self._enter(who)
            self._generators.append(who)
        try:
            yield version
        finally:
            with self._lock:
                self._generators.remove(who)
                self._readers.remove(who)

    @contextmanager
    def reading(self, who: str) -> Iterator[int]:
        """A reader of the weights alone, such as a prefix pass. Yields the version it reads."""
        with self._lock:
            version = self._enter(who)
        try:
            yield version
        finally:
            with self._lock:
                self._readers.remove(who)

    @contextmanager
    def writing(self, who: str) -> Iterator[None]:
        """The only user of valid weights: an update in place. Leaving without an error makes a new version; after an
        error the weights are invalid until they are loaded, because nobody knows how much was written, save
        with TrainingError, which says that none was changed."""
        with self._lock:
            self._need_alone(who)
            self._need_weights(who)
            self._writer = who
        with self._completed():
            yield

    @contextmanager
    def loading(self, who: str) -> Iterator[None]:
        """A writer that replaces all weights, valid or not; they need memory, so released ones must be woken first."""
        with self._lock:
            self._need_alone(who)
            if self._at["weights"] is not Residency.RESIDENT:
                raise StateError(f"{who} would load into weights that are {self._at['weights']}; wake them first")
            self._writer = who
        with self._completed():
            yield

    @contextmanager
    def _completed(self) -> Iterator[None]:
        complete, valid = False, False
        try:
            yield
            complete = valid = True
        except TrainingError:  # nothing was written
            valid = self._valid
            raise
        finally:
            with self._lock:
                self._writer = None
                self._valid = valid
                self._version += complete

    def _sleep(self, what: str, to: Residency) -> None:
        with self._lock:
            if self._at[what] is not Residency.RESIDENT:
                raise StateError(f"{what} cannot become {to}: already {self._at[what]}, needed resident")
            if what == "kv" and self._generators:
                raise StateError(f"kv cannot become {to} while {', '.join(self._generators)} generate; wait for them")
            if what == "weights":
                self._need_alone(f"the move of weights to {to}")
                if to is Residency.OFFLOADED and not self._valid:
                    raise StateError("weights cannot become offloaded: they were not loaded; load or release them")
                self._valid = self._valid and to is Residency.OFFLOADED
            self._at[what] = to

    def _wake(self, what: str) -> None:
        with self._lock:
            if self._at[what] is Residency.RESIDENT:
                raise StateError(f"{what} cannot be woken: resident already; each wake follows one sleep")
            self._at[what] = Residency.RESIDENT

    def _need_alone(self, who: str) -> None:
        if self._readers:
            readers = ", ".join(sorted(self._readers))
            raise StateError(f"{who} cannot start while {readers} hold the weights; wait for them")
        if self._writer is not None:
            raise StateError(f"{who} cannot start while {self._writer} writes the weights; wait for it")

    def _need_weights(self, who: str) -> None:
        if self._at["weights"] is not Residency.RESIDENT:
            raise StateError(f"{who} needs weights that are {self._at['weights']}; wake them first")
        if not self._valid:
            raise StateError(f"{who} needs weights that were not loaded since they were released or half written")

    def _enter(self, who: str) -> int:
        self._need_weights(who)
        if self._writer is not None:
            raise StateError(f"{who} cannot read the weights while {self._writer} writes them; wait for it")
        self._readers.append(who)
        return self._version
