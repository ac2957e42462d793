"""Weights, gradients and optimizer state divided among data-parallel ranks: FSDP2, with its collectives at two places.

    gather   all weights, once, from the end of one optimizer step to the end of the next
    reduce   all gradients, once, before the optimizer

Between the two a rank runs as many prompt, response and prefix backward passes as its own prompts need; no pass of one
rank waits for one of another. FSDP2's own hooks would gather inside the passes: then a rank with text only never calls
the vision tower, and the ranks with images wait for it for ever. Here such a rank takes part with a gradient of zeros,
wherever any rank has one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollplex.errors import ConfigError
from rollplex.models.fused import mark_backed
from rollplex.models.policy import Policy
from rollplex.parallel.waits import Peers


class _Anchor(nn.Module):
    """A root whose forward and backward do nothing: FSDP2 reduces gradients at the end of a backward through it."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class DataShards:
    """A policy's model under FSDP2 over `peers`. The model's parameters are copied, and divided along their rows;
    `weights.bind.store` writes them into a backing, to hand them over.

    Raises ConfigError for 16-bit weights, whose gradients FSDP2 would add up in 16 bits between micro-batches.
    """

    def __init__(self, policy: Policy, mesh: DeviceMesh, peers: Peers):
        if policy.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"model.dtype {str(policy.dtype).removeprefix('torch.')} cannot be divided among {peers.size} "
                "data-parallel ranks: gradients of micro-batches would be added up in 16 bits; set model.dtype to "
                "float32, or start one replica of sharing.train_tp processes"
            )
        self.model, self.peers = policy.model, peers
        for parameter in self.model.parameters():  # a backing may hold them transposed, which FSDP2 does not divide
            parameter.data = parameter.data.contiguous()
        layers: list[Any] = list(policy.adapter.layers)
        self._root: Any = _Anchor(self.model)
        self._modules: list[Any] = [self._root, *layers]
        for module in reversed(self._modules):  # inner ones first: the root takes what is left, vision tower included
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        for module in self._modules:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)  # losses carry their whole normalisation: gradients are summed
        self._shards = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.local = {name: _local(shard) for name, shard in self._shards.items()}
        self.gather()

    def gather(self) -> None:
        """Whole parameters on every rank (of its tensor-parallel shard), as the model's own."""
        with self.peers.waiting("gather of weights from data-parallel ranks"):
            for module in self._modules:
                module.unshard()
            self._root.set_requires_gradient_sync(False)
            self._root.set_reshard_after_backward(False)
        for parameter in self.model.parameters():  # the next gather writes where they are now
            mark_backed(parameter)

    def reduce(self) -> dict[str, torch.Tensor]:
        """This rank's rows of the gradients, summed over ranks; the model is left divided.

        A weight that some rank has a gradient for gets one, with zeros from ranks that have none; one that no rank
        has a gradient for gets none.
        """
        whole = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        reached = torch.tensor([p.grad is not None for p in whole.values()], dtype=torch.int32, device=self._device)
        self.peers.wait(
            dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=self.peers.group, async_op=True),
            "which weights have gradients on data-parallel ranks",
        )
        for parameter, wanted in zip(whole.values(), reached.tolist(), strict=True):
            if wanted and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._root.set_requires_gradient_sync(True)
        self._root.set_reshard_after_backward(True)
        with self.peers.waiting("sum of gradients over data-parallel ranks"), torch.enable_grad():
            self._root(torch.zeros((), device=self._device, requires_grad=True)).backward()
        gradients = {}
        for name, shard in self._shards.items():
            if shard.grad is not None:
                gradients[name] = _local(shard.grad)
                shard.grad = None
        return gradients

    def whole(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """All rows of what is divided as weight `name` is, from this rank's `rows`. All ranks must call it."""
        shard = self._shards[name]
        assert isinstance(shard, DTensor)
        divided: Any = DTensor.from_local(
            rows, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
        )
        with self.peers.waiting(f"gather of {name} from data-parallel ranks"):
            full: torch.Tensor = divided.full_tensor()
        return full

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what is divided as a weight is: equal runs, the last ones shorter or empty."""
        parts = torch.chunk(whole, self.peers.size)
        return parts[self.peers.rank] if self.peers.rank < len(parts) else whole[:0]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.local.values())).device


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the same memory."""
    assert isinstance(tensor, DTensor)
    part: torch.Tensor = cast(DTensor, tensor.detach()).to_local()
    return part
