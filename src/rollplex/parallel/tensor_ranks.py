"""models.ranks.TensorRanks over a process group: the sums of tensor parallelism, with their backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rollplex.parallel.waits import Peers


class ProcessRanks:
    """One rank of a tensor-parallel group. All ranks must hold the same prompts and responses.

    Values that are whole on every rank stay bitwise equal there: a sum over ranks is computed once and handed to all,
    and everything else is computed alike.
    """

    def __init__(self, peers: Peers):
        self.peers = peers

    @property
    def rank(self) -> int:
        """0 to size - 1."""
        return self.peers.rank

    @property
    def size(self) -> int:
        """Tensor-parallel degree."""
        return self.peers.size

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as it is; its gradient is summed over ranks."""
        entered: torch.Tensor = _Enter.apply(x, self)
        return entered

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over ranks; its gradient is handed back as it is."""
        left: torch.Tensor = _Leave.apply(x, self)
        return left

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over ranks, outside autograd."""
        return self.summed(x, "sum of partial results")

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """(size, ...): `x` of every rank in order, outside autograd."""
        own = x.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        work = dist.all_gather(parts, own, group=self.peers.group, async_op=True)
        self.peers.wait(work, "gather of vocabulary parts")
        return torch.stack(parts)

    def collected(self, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        """`x` of every rank in order, on rank 0 alone (elsewhere []), outside autograd; `what` names it in errors."""
        own = x.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        work = dist.gather(own, parts or None, group=self.peers.group, group_dst=0, async_op=True)
        self.peers.wait(work, what)
        return parts

    def summed(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """`x` summed over ranks, as a new contiguous tensor; `what` names the sum in errors."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.peers.wait(dist.all_reduce(total, group=self.peers.group, async_op=True), what)
        return total


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ProcessRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.summed(grads[0], "sum of gradients before a column-parallel layer"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: ProcessRanks) -> torch.Tensor:
        return ranks.summed(x, "sum of a row-parallel layer's parts")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
