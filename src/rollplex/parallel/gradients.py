"""What tensor-parallel ranks still owe each other when all backward passes are done.

A backward leaves whole gradients for what a rank alone holds, and equal ones for what all hold and use alike. Two kinds
are parts of a sum: key/value heads that several ranks hold, each for its own query heads, and the norms of queries and
keys, which all ranks hold and each applies to its own heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from rollplex.models.shard_plan import Kind, PlanTensor
from rollplex.parallel.tensor_ranks import ProcessRanks
from rollplex.parallel.waits import Peers

_Combine = Callable[[torch.Tensor], torch.Tensor]


class GradientSums:
    """Sums and norm of the gradients of one model's tensors, by the names of its shard plan."""

    def __init__(self, tensors: Sequence[PlanTensor], ranks: ProcessRanks):
        self.ranks = ranks
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def holders(self, name: str) -> int:
        """On how many ranks each element of a tensor is."""
        tensor = self._tensors[name]
        if tensor.kind in (Kind.REPLICATED, Kind.VISION):
            return self.ranks.size
        return max(1, self.ranks.size // tensor.heads) if tensor.heads else 1

    def complete(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sum in place what is still parts, for all ranks that hold it. Every rank must pass the same names."""
        if self.ranks.size == 1:
            return
        per_head = [name for name in gradients if self._tensors[name].kind is Kind.REPLICATED and ".self_attn." in name]
        self._replace(gradients, per_head, lambda parts: parts.sum(0))
        shared = [name for name in gradients if self._tensors[name].heads and self.holders(name) > 1]
        for count in sorted({self.holders(name) for name in shared}):
            first = self.ranks.rank // count * count  # neighbours hold the same head
            names = [name for name in shared if self.holders(name) == count]
            self._replace(gradients, names, lambda parts, a=first, n=count: parts[a : a + n].sum(0))  # type: ignore[misc]

    def norm(self, gradients: Mapping[str, torch.Tensor], data: Peers | None) -> float:
        """L2 norm of the whole model's gradient. data: the ranks among which every tensor here is divided further."""
        device = next(iter(gradients.values())).device if gradients else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, gradient in gradients.items():
            total += gradient.double().square().sum() / self.holders(name)
        for peers in (self.ranks.peers, data):
            if peers is not None:
                peers.wait(dist.all_reduce(total, group=peers.group, async_op=True), "sum of gradient norms")
        return float(total.sqrt())

    def _replace(self, gradients: Mapping[str, torch.Tensor], names: Sequence[str], combine: _Combine) -> None:
        """All of `names` in one gather: `combine` gets (size, elements) of every rank."""
        if not names:
            return
        flat = combine(self.ranks.join(torch.cat([gradients[name].reshape(-1) for name in names])))
        sizes = [gradients[name].numel() for name in names]
        for name, part in zip(names, flat.split(sizes), strict=True):
            gradients[name].copy_(part.view(gradients[name].shape))
