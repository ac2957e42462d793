"""Do two sets of learning curves differ by more than their seeds do? Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

Curve = Sequence[float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distance of the mean curves of two arms, against what splitting the same curves otherwise gives."""

    distance: float  # mean over steps of |mean curve A - mean curve B|, after smoothing
    split_distances: tuple[float, ...]  # the same for every other way to split all curves in two halves, ascending
    p_value: float  # share of all splits (the real one included) whose distance is at least the real one's

    @property
    def noise(self) -> float:
        """Median distance of the other splits: what seeds alone make."""
        middle = len(self.split_distances) // 2
        return self.split_distances[middle]


def smoothed(curve: Curve, window: int) -> list[float]:
    """Mean of each run of `window` neighbouring steps; window - 1 values shorter than the curve."""
    if not 1 <= window <= len(curve):
        raise ValueError(f"window {window} does not fit a curve of {len(curve)} steps")
    return [sum(curve[start : start + window]) / window for start in range(len(curve) - window + 1)]


def mean_curve(curves: Sequence[Curve]) -> list[float]:
    """Step-wise mean of curves of equal length."""
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def distance(first: Sequence[Curve], second: Sequence[Curve]) -> float:
    """Mean absolute difference of two mean curves."""
    gaps = [abs(a - b) for a, b in zip(mean_curve(first), mean_curve(second), strict=True)]
    return sum(gaps) / len(gaps)


def agreement(first: Sequence[Curve], second: Sequence[Curve], window: int) -> Agreement:
    """Permutation test over all ways to split the curves in two sets of the same sizes (10 for three and three)."""
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"needed two equal sets of at least 2 curves, found {len(first)} and {len(second)}")
    curves = [smoothed(curve, window) for curve in [*first, *second]]
    size = len(first)
    real = distance(curves[:size], curves[size:])
    # A split and its mirror image are one: keep those with curve 0 on the first side.
    splits = [chosen for chosen in combinations(range(len(curves)), size) if 0 in chosen]
    others = []
    for chosen in splits:
        if chosen != tuple(range(size)):
            rest = [curves[i] for i in range(len(curves)) if i not in chosen]
            others.append(distance([curves[i] for i in chosen], rest))
    at_least = 1 + sum(other >= real for other in others)
    return Agreement(real, tuple(sorted(others)), at_least / len(splits))
