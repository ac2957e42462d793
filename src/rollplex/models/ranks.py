"""What a decoder asks of the ranks that share its layers: where values are summed, forward and backward.

Under tensor parallelism a rank holds some heads, some columns of the MLP and some rows of the vocabulary
(models/shard_plan.py), and everything between is whole and equal on all ranks. So a pass has few seams:

    x --enter--> column-parallel (q, k, v; gate, up; head)      forward: x itself     backward: sum over ranks
    row-parallel (o_proj, down_proj; embedding) --leave--> x    forward: sum          backward: the gradient itself

(f and g of Megatron-LM, Shoeybi et al. 2019, section 3.) `ALONE` is a process without others: every method is the
identity there, bit for bit. parallel/tensor_ranks.py has the one that talks to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F


class TensorRanks(Protocol):
    """This process's place among the `size` ranks of a tensor-parallel group. All make the same calls in order."""

    @property
    def rank(self) -> int:
        """0 to size - 1."""

    @property
    def size(self) -> int:
        """Tensor-parallel degree."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as it is; its gradient is summed over ranks."""

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over ranks; its gradient is handed back as it is."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over ranks, outside autograd."""

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """(size, ...): `x` of every rank in order, outside autograd."""


class _Alone:
    rank, size = 0, 1

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)


ALONE: TensorRanks = _Alone()


@dataclass(frozen=True, slots=True)
class VocabPart:
    """The token ids whose rows of embedding and head this rank holds: from `first` on, `rows` of them.

    `padded` rows are held on every rank; those behind `rows` belong to no token and are never read.
    """

    ranks: TensorRanks
    first: int
    rows: int
    padded: int

    @classmethod
    def of(cls, ranks: TensorRanks, padded: int, vocab_size: int) -> VocabPart:
        """Of a rank that holds `padded` rows of a vocabulary of `vocab_size`."""
        first = ranks.rank * padded
        return cls(ranks, first, max(0, min(padded, vocab_size - first)), padded)

    def places(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(row of each token, 0 where another rank has it; whether this rank has it)"""
        places = tokens - self.first
        mine = (places >= 0) & (places < self.rows)
        return torch.where(mine, places, 0), mine

    def whole(self, x: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """(..., vocab_size) from every rank's (..., padded), outside autograd."""
        if self.ranks.size == 1:
            return x
        return self.ranks.join(x).movedim(0, -2).flatten(-2)[..., :vocab_size]


class VocabEmbedding(nn.Module):
    """The embedding of a vocabulary that is divided among ranks. Holds the model's own module; makes no parameters."""

    def __init__(self, module: nn.Embedding, part: VocabPart):
        super().__init__()
        self.module, self.part = module, part

    @property
    def weight(self) -> torch.Tensor:
        """(padded, C): this rank's rows."""
        return self.module.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(..., C) embeddings of `ids`, whole on every rank."""
        places, mine = self.part.places(ids)
        rows = F.embedding(places, self.weight) * mine.unsqueeze(-1)
        return self.part.ranks.leave(rows)
