"""Memory records under pipeline, context and expert parallelism: what each axis leaves of them on one device.

`memory.contract.step_records` counts a device under tensor x data parallelism. The other axes divide what it counted:

| record | left on a device |
|---|---|
| weights, reference | its parameters under the plan / under tensor parallelism alone |
| gradients | its trained parameters, likewise |
| optimizer state | as gradients; sharded: among all that hold the same, context ranks too, of experts fewer |
| rollout KV cache | 1 / pipeline |
| boundaries, their gradients, prefix activations | 1 / (pipeline x context): own layers, own part of the prompt |
| response activations | 1 / context, and min(p, m) / p: 1F1B holds p micro-batches of L / p layers on the first stage |
| logits, buffers | 1 / context |
| workspaces of a layer | 1 / context in training, all of it in the rollout |
Activations of experts are those of an MLP as wide as the active ones together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from math import ceil

from rollplex.memory.model_bytes import Activations, rank_parameters
from rollplex.memory.records import Choice, MemoryRecord
from rollplex.planner.flops import ModelCounts
from rollplex.planner.parallel import Parallel


def divided(
    records: Iterable[MemoryRecord],
    counts: ModelCounts,
    train: Parallel,
    rollout: Parallel,
    *,
    shard_optimizer: bool,
    micro_batches: int,
) -> tuple[MemoryRecord, ...]:
    """`records` (of these tensor degrees, and `data` training replicas) with all axes applied; seconds of a choice
    shrink with its bytes. micro_batches: those of one optimizer step on a replica."""
    shares = _Shares(counts, train, rollout, shard_optimizer, micro_batches)
    return tuple(_scaled(record, shares.of(record.name)) for record in records)


@dataclasses.dataclass(frozen=True, slots=True)
class _Shares:
    counts: ModelCounts
    train: Parallel
    rollout: Parallel
    shard_optimizer: bool
    micro_batches: int

    def of(self, name: str) -> float:
        """What is left of the record of that name."""
        train, context = self.train, 1.0 / self.train.context
        if name == "rollout KV cache":
            return 1.0 / self.rollout.pipeline
        if name == "rollout workspace":
            return self._wider(self.rollout, sequence=False)
        if name.startswith("actor weights, rollout"):
            return self._weights(self.rollout)
        if "weights" in name:
            return self._weights(train)
        if name in ("gradients", "optimizer state"):
            return self._trained(sharded=self.shard_optimizer and name == "optimizer state")
        if "boundary" in name:
            return context / train.pipeline
        if name == "prefix activations":
            return context / train.pipeline * self._wider(train, train.sequence)
        if name == "response activations":
            return (
                context * min(train.pipeline, self.micro_batches) / train.pipeline * self._wider(train, train.sequence)
            )
        if name == "layer workspace":
            return context * self._wider(train, train.sequence)
        return context if name != "gradient reduction bucket" else 1.0

    def _weights(self, plan: Parallel) -> float:
        return sum(plan.parameters(self.counts)) / rank_parameters(self.counts.shape, plan.tensor).total

    def _trained(self, *, sharded: bool) -> float:
        """Of what tensor parallelism and, sharded, the replicas alone leave."""
        whole = rank_parameters(self.counts.shape, self.train.tensor)
        counted = whole.total if self.counts.vision_trained else whole.text
        share = self.train.data if sharded else 1
        return self.train.optimized(self.counts, sharded=sharded) * share / counted

    def _wider(self, plan: Parallel, sequence: bool) -> float:
        """What a layer of experts keeps over one with an MLP as wide as a single expert."""
        experts, text = self.counts.experts, self.counts.shape.text
        if experts is None:
            return 1.0
        active = dataclasses.replace(text, intermediate_size=experts.active * text.intermediate_size)
        shapes = (dataclasses.replace(self.counts.shape, text=active), self.counts.shape)
        many, one = (Activations(shape, self.counts.dtype_bytes, plan.tensor, sequence).layer(1024) for shape in shapes)
        return many / one


def _scaled(record: MemoryRecord, share: float) -> MemoryRecord:
    if share == 1.0:
        return record

    def left(nbytes: int) -> int:
        return ceil(nbytes * share)

    choices = tuple(
        Choice(
            choice.policy,
            {phase: left(size) for phase, size in choice.held.items()},
            choice.restore_s * share,
            choice.detail,
            left(choice.host_bytes),
        )
        for choice in record.choices
    )
    formula = f"({record.formula}) x {share:.4g} on a device"
    return dataclasses.replace(record, nbytes=left(record.nbytes), choices=choices, formula=formula)
