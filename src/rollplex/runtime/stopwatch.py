"""Wall time per phase of a step: as sums for the metrics, as spans for the trace; and its allocations, if counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from rollplex.memory.allocations import AllocationCounter
from rollplex.trace import Span


def _to_epoch_s() -> float:
    """What time.monotonic lacks to time.time. The most of a few looks: a thread that the system puts aside between its
    two clocks sees less."""
    return max(time.time() - time.monotonic() for _ in range(5))


@dataclass
class Stopwatch:
    """Sums seconds per phase name that the main thread spent (`metrics`), and keeps what ran when (`spans`).

    Times are those of time.monotonic. Lane "main" holds what had the device to itself, "window" passes beside decoding;
    lanes "decode" and "reward" hold groups. `record` may be called from any thread.
    """

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    allocations: AllocationCounter | None = None  # of a step whose memory is counted
    to_epoch_s: float = field(default_factory=_to_epoch_s)  # so that resumed runs line up

    @contextmanager
    def phase(self, name: str, *, lane: str = "main", group: int | None = None, traced: bool = True) -> Iterator[float]:
        """Add the block's wall time to `name`, and a span to `lane`. Yields when it began.

        traced=False: no span, since the groups of this phase have their own.
        """
        begin_s = time.monotonic()
        try:
            yield begin_s
        finally:
            end_s = time.monotonic()
            self.add(name, end_s - begin_s)
            if traced:
                self.record(name, lane, begin_s, end_s, group=group)

    def add(self, name: str, seconds: float) -> None:
        """Add to the sum of `name` without a span."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def record(self, name: str, lane: str, start_s: float, end_s: float, *, group: int | None = None) -> None:
        """Add a span, in seconds of time.monotonic."""
        offset = self.to_epoch_s
        self.spans.append(Span(name, lane, start_s + offset, end_s + offset, self.step, group))

    def counting(self) -> AbstractContextManager[None]:
        """A block of the calling thread whose allocations count."""
        return nullcontext() if self.allocations is None else self.allocations.counting()

    @staticmethod
    def now() -> float:
        """Seconds of the clock that `record` takes."""
        return time.monotonic()

    def total(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.monotonic() - self.started

    def metrics(self) -> dict[str, float]:
        """timing_s/<phase>."""
        return {f"timing_s/{name}": value for name, value in self.seconds.items()}
