"""How an optimizer step is cut: minibatches of groups, packs of prompts, micro-batches of responses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.types import FinishReason, Response, ScoredGroup


def pack_by_tokens(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Consecutive items packed while their sum stays within `budget`; an item over it stands alone.

    Example: pack_by_tokens([3, 3, 9, 2], budget=6) == [[0, 1], [2], [3]]
    """
    packs: list[list[int]] = []
    total = 0
    for item, size in enumerate(sizes):
        if not packs or total + size > budget:
            packs.append([])
            total = 0
        packs[-1].append(item)
        total += size
    return packs


def pack_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """As `pack_by_tokens` for sequences that are padded to the longest of their pack: padding counts too.

    Example: pack_padded([2, 2, 5, 1], budget=6) == [[0, 1], [2], [3]]
    """
    packs: list[list[int]] = []
    longest = 0
    for item, length in enumerate(lengths):
        longest = max(longest, length)
        if not packs or longest * (len(packs[-1]) + 1) > budget:
            packs.append([])
            longest = length
        packs[-1].append(item)
    return packs


def minibatches(groups: Sequence[ScoredGroup], steps: int) -> list[list[ScoredGroup]]:
    """`groups` in order, cut into `steps` runs whose sizes differ by at most one; empty runs are left out."""
    bounds = [len(groups) * step // steps for step in range(steps + 1)]
    return [list(groups[a:b]) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


@dataclass(frozen=True, slots=True)
class Item:
    """One response on its way through the update."""

    scored: ScoredGroup
    index: int
    counts: bool  # whether it counts in the loss (mask_truncated_completions)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its token ids."""
        return self.scored.group.responses[self.index].token_ids

    @property
    def advantage(self) -> float:
        """Its advantage."""
        return self.scored.advantages[self.index]


def counts_in_loss(response: Response, *, mask_truncated: bool) -> bool:
    """Whether a response counts: all do, save those cut at the length limit under mask_truncated_completions."""
    return not (mask_truncated and response.finish is FinishReason.LENGTH)


def items_of(groups: Sequence[ScoredGroup], *, mask_truncated: bool) -> list[Item]:
    """All responses of `groups` in order."""
    return [
        Item(scored, index, counts_in_loss(response, mask_truncated=mask_truncated))
        for scored in groups
        for index, response in enumerate(scored.group.responses)
    ]
