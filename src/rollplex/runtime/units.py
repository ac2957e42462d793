"""What the executor schedules as one group: neighbouring prompts whose passes run together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollplex.runtime.collect import Slot
from rollplex.train.microbatch import pack_by_tokens


@dataclass(frozen=True, slots=True)
class Unit:
    """Prompts of one prefix pass, all of one minibatch."""

    slots: tuple[Slot, ...]
    minibatch: int

    @property
    def rollout_ids(self) -> tuple[int, ...]:
        """Of its prompts, in the order of the pass."""
        return tuple(slot.rollout_id for slot in self.slots)


def cut_units(slots: Sequence[Slot], *, minibatches: int, budget_tokens: int, copies: int = 1) -> list[Unit]:
    """`slots` in `minibatches` runs of equal size, each cut into passes of at most `budget_tokens`.

    copies: how often a pass computes each prompt. A longer prompt stands alone. Equally long prompts become neighbours:
    their attention shares one call. Raises ValueError when the minibatches do not divide the slots.
    """
    size, rest = divmod(len(slots), minibatches)
    if rest or not size:
        raise ValueError(f"{len(slots)} prompts do not make {minibatches} equal minibatches")
    units = []
    for number in range(minibatches):
        part = sorted(slots[number * size : (number + 1) * size], key=lambda slot: slot.spec.num_tokens)
        for members in pack_by_tokens([slot.spec.num_tokens * copies for slot in part], budget_tokens):
            units.append(Unit(tuple(part[m] for m in members), number))
    return units
