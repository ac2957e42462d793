"""Partial metrics of a micro-batch that merge into the exact metrics of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetricSums:
    """0-d tensors without gradient; merging never copies them off the device, `values` does so once.

    Means keep sum and count apart, so unequal micro-batches weigh as their tokens or responses do.
    """

    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    means: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # (sum, count)
    minima: Mapping[str, torch.Tensor] = field(default_factory=dict)  # inf where nothing was counted
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)  # -inf where nothing was counted

    def merge(self, other: MetricSums) -> MetricSums:
        """The metrics of both parts together; a key that only one part has stays as it is."""
        return MetricSums(
            _join(self.sums, other.sums, torch.add),
            _join(self.means, other.means, _add_means),
            _join(self.minima, other.minima, torch.minimum),
            _join(self.maxima, other.maxima, torch.maximum),
        )

    def on_host(self) -> MetricSums:
        """The same, off the device: for another process."""
        return MetricSums(
            {name: value.cpu() for name, value in self.sums.items()},
            {name: (total.cpu(), count.cpu()) for name, (total, count) in self.means.items()},
            {name: value.cpu() for name, value in self.minima.items()},
            {name: value.cpu() for name, value in self.maxima.items()},
        )

    def values(self) -> dict[str, float]:
        """Final values. A mean, minimum or maximum over nothing is left out."""
        named = {
            **self.sums,
            **{name: total / count for name, (total, count) in self.means.items()},
            **self.minima,
            **self.maxima,
        }
        if not named:
            return {}
        counts = {name: count for name, (_, count) in self.means.items()}
        tensors = [value.double() for value in (*named.values(), *counts.values())]
        numbers = torch.stack(tensors).tolist()
        final = dict(zip(named, numbers, strict=False))
        empty = {name for name, count in zip(counts, numbers[len(named) :], strict=True) if count == 0}
        empty |= {name for name in self.minima if final[name] == float("inf")}
        empty |= {name for name in self.maxima if final[name] == float("-inf")}
        return {name: value for name, value in final.items() if name not in empty}


def merge_metrics(parts: Iterable[MetricSums]) -> MetricSums:
    """Metrics of the union of disjoint micro-batches."""
    return reduce(MetricSums.merge, parts, MetricSums())


def _add_means(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return a[0] + b[0], a[1] + b[1]


def _join(a: Mapping[str, T], b: Mapping[str, T], combine: Callable[[T, T], T]) -> dict[str, T]:
    return {**a, **{name: combine(a[name], value) if name in a else value for name, value in b.items()}}
