"""Sizes of an optimizer step whose groups lie on several data-parallel ranks: each computes a share of one loss."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.parallel.waits import Peers
from rollplex.train.loss import LossTotals
from rollplex.train.microbatch import Item


def totals_over_ranks(
    peers: Peers, items: Sequence[Item], *, rollout_tokens: int | None = None, steps_per_generation: int = 1
) -> LossTotals:
    """LossTotals of the step over the `items` of all ranks, the same on each.

    rollout_tokens: counted tokens of this rank's part of the rollout; absent: the step takes the whole rollout.
    """
    own = ([len(item.tokens) for item in items], [item.counts for item in items], rollout_tokens)
    found = peers.exchange(own, "sizes of the optimizer step")
    return LossTotals.of_step(
        [length for lengths, _, _ in found for length in lengths],
        [counts for _, flags, _ in found for counts in flags],
        rollout_tokens=None if rollout_tokens is None else sum(tokens for _, _, tokens in found),
        steps_per_generation=steps_per_generation,
    )
