"""Rewards as text: a sparkline for one line, a chart for the end of a run, and how far it rose. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# From a blank for the lowest to a full block for the highest value.
_LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_LEVELS = " .:-=+*#@"
MOST_COMPARED = 10  # steps of each end that `rise` compares


@dataclass(frozen=True, slots=True)
class Rise:
    """Mean reward of a run's first and last `steps` steps."""

    first: float
    last: float
    steps: int

    @property
    def difference(self) -> float:
        """How far the mean reward rose."""
        return self.last - self.first


def rise(rewards: Sequence[float]) -> Rise | None:
    """Compare the first with the last ten steps, or halves when there are fewer than twenty; None below two steps."""
    count = min(MOST_COMPARED, len(rewards) // 2)
    if count == 0:
        return None
    return Rise(math.fsum(rewards[:count]) / count, math.fsum(rewards[-count:]) / count, count)


def bucket_means(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbouring values, in order; values that are not finite are left out.

    Example: bucket_means([1, 2, 3, 4], 2) == [1.5, 3.5]
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)] if count else []
    return [math.fsum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """One line of at most `width` blocks from the lowest to the highest of the bucketed values."""
    means = bucket_means(values, width)
    if not means:
        return ""
    levels = (_ASCII_LEVELS if ascii_only else _LEVELS)[1:]
    low, high = min(means), max(means)
    span = high - low
    if span == 0:
        return levels[len(levels) // 2] * len(means)
    return "".join(levels[round((mean - low) / span * (len(levels) - 1))] for mean in means)


def chart(values: Sequence[float], *, width: int = 60, height: int = 8, ascii_only: bool = False) -> list[str]:
    """Lines of a bar chart, highest first, with the value axis on the left and steps below; empty without values."""
    means = bucket_means(values, width)
    if not means:
        return []
    low, high = min(means), max(means)
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    full = len(levels) - 1
    if high > low:
        # One part in eight of a row stays visible for the lowest value, so that it is not mistaken for a missing one.
        heights = [max(1, round((mean - low) / (high - low) * height * full)) for mean in means]
        labels = {height - 1: high, 0: low}
    else:
        middle = height // 2
        heights = [(middle + 1) * full] * len(means)
        labels = {middle: low}
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{labels[row]:8.3f}" if row in labels else " " * 8
        bars = "".join(levels[min(full, max(0, filled - row * full))] for filled in heights)
        lines.append(f"{label} {'|' if ascii_only else chr(0x2502)}{bars}".rstrip())
    last = f"step {len(values)}"
    lines.append(" " * 10 + "step 1" + last.rjust(max(len(last) + 1, len(means) - len("step 1"))))
    return lines
