"""Wall time per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Sums seconds per phase name; `metrics` gives them as timing_s/<phase>."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def total(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.perf_counter() - self.started

    def metrics(self) -> dict[str, float]:
        """timing_s/<phase>."""
        return {f"timing_s/{name}": value for name, value in self.seconds.items()}
