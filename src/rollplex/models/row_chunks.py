"""How a prompt pass cuts its rows, so that no product of it takes more than so many tokens.

Beside decoding on a GPU a pass is a queue of kernels, and decoding waits for the one that runs. A whole video in one
kernel per product makes that wait long; `schedule.chunk_tokens` bounds it inside a prompt:

    projections, norms, MLP     take each row by itself: any neighbouring rows of the pack, across prompts too
    attention                   some queries of one prompt and all its keys up to the last of them

Parts are as even as can be: a short rest would be as many kernels for less work, and attention of 1 to 3 rows has other
last bits on one thread of a CPU than on two (few rows of products: steady.py). Not cut: copies, the embedding, and the
last layer's scores of each prompt's last position. An attention kernel reads all keys so far, so that its time still
grows with the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

import torch
from torch.nn.attention.bias import causal_lower_right


def equal_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(length, count) of maximal runs of equal consecutive lengths. Example: [5, 5, 7] -> [(5, 2), (7, 1)]."""
    return [(length, len(list(run))) for length, run in groupby(lengths)]


def even_parts(total: int, limit: int | None) -> list[int]:
    """`total` in as few parts of at most `limit` as it takes, as even as can be. Example: 10, 4 -> [3, 3, 4]."""
    count = 1 if limit is None else ceil(total / limit)
    return [(number + 1) * total // count - number * total // count for number in range(count)]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The cuts of one pass over prompts of `lengths` tokens, packed. Shared by its layers."""

    lengths: tuple[int, ...]
    limit: int | None  # rows of a chunk; None: the pass runs whole
    # (S, longest + S), 0 up to a diagonal and -inf beyond; on a CPU, where a prompt is cut. Every mask is a part of it,
    # so that a graph keeps one for all layers.
    band: torch.Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], limit: int | None, like: torch.Tensor) -> RowChunks:
        """like: has the device and the dtype of the pass."""
        queries = [max(even_parts(length, limit)) for length in lengths if limit is not None and length > limit]
        if not queries or like.device.type != "cpu":
            return cls(tuple(lengths), limit, None)
        rows, longest = max(queries), max(lengths)
        band = like.new_full((rows, longest + rows), float("-inf")).triu_(longest + 1)
        return cls(tuple(lengths), limit, band)

    def rows(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The same rows of each of `tensors` (T, ...), chunk after chunk."""
        sizes = even_parts(sum(self.lengths), self.limit)
        if len(sizes) == 1:
            return iter([tensors])  # not as views: their backward would copy
        return zip(*(tensor.split(sizes) for tensor in tensors), strict=True)

    def runs(self) -> list[tuple[int, int]]:
        """(length, count) of neighbours of one length whose attention runs together: a prompt that is cut stands alone,
        and others are together within the limit."""
        runs = equal_runs(self.lengths)
        if self.limit is None:
            return runs
        return [(length, part) for length, count in runs for part in even_parts(count, max(1, self.limit // length))]

    def mask(self, queries: int, keys: int) -> torch.Tensor:
        """What attention adds to the scores of the last `queries` of a prompt's first `keys` positions."""
        if self.band is None:  # never written out: the kernels of a GPU know this shape
            bias: torch.Tensor = causal_lower_right(queries, keys)
            return bias
        first = self.band.shape[1] - self.band.shape[0] - keys + queries
        return self.band[:queries, first : first + keys]
