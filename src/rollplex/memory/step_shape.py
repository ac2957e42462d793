"""What memory is counted for: the sizes of one step, and what moving and recomputing cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from rollplex.memory import model_bytes
from rollplex.models.shapes import ModelShape
from rollplex.schedule.spec import Phase


@dataclass(frozen=True, slots=True)
class Hardware:
    """What moving and recomputing cost, in bytes and operations per second."""

    host_link: float  # between device and host memory, each way
    device_memory: float
    flops: float  # reached in matrix products, not the data sheet's peak


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step consists of. Lengths are the longest; contract.py says what shorter ones can make of a step."""

    model: ModelShape
    dtype_bytes: int
    devices: int
    train_tp: int
    rollout_tp: int
    prompts: int  # of one rollout, all devices together
    generations: int
    prompt_tokens: int
    visual_tokens: int  # of one prompt's
    response_tokens: int
    micro_batch_tokens: int
    activations: Literal["graph", "checkpoint", "recompute"]
    reference: bool
    vision_trained: bool
    separate_engine: bool  # the rollout engine has weights of its own unless they are shared
    layouts_differ: bool  # training and rollout order q, k, v differently
    sequence_parallel: bool
    shard_optimizer: bool
    stream_chunk_bytes: int
    kernels: Literal["eager", "fused"] = "fused"
    decode_rows: int | None = None  # most responses decoded together; absent: all of an engine
    local_engine: bool = False  # decodes on the update's own prefixes: PREFILL is the actor's prefix pass
    unit_tokens: int | None = None  # budget of a prefix pass; absent: micro_batch_tokens
    chunk_tokens: int | None = None  # rows of a layer that run at once in a prefix pass; absent: all
    cached_vision_bytes: int = 0  # features of towers that stand still: the reference's, a frozen one's

    @property
    def data_parallel(self) -> int:
        """Training replicas."""
        return self.devices // self.train_tp

    @property
    def train_prompts(self) -> int:
        """Prompts of the fullest training replica; a group stays on one."""
        return ceil(self.prompts / self.data_parallel)

    @property
    def rollout_prompts(self) -> int:
        """Prompts of the fullest rollout engine."""
        return ceil(self.prompts / (self.devices // self.rollout_tp))

    @property
    def rollout_rows(self) -> int:
        """Responses that the fullest rollout engine decodes together."""
        rows = self.rollout_prompts * self.generations
        return rows if self.decode_rows is None else min(rows, self.decode_rows)

    @property
    def pack_budget_tokens(self) -> int:
        """Token budget of one prefix pass; a longer prompt stands alone."""
        return min(self.micro_batch_tokens, self.unit_tokens or self.micro_batch_tokens)

    @property
    def pack_prompts(self) -> int:
        """Prompts that one prefix pass takes: as many as the token budget holds, one at least."""
        return min(self.train_prompts, max(1, self.pack_budget_tokens // self.prompt_tokens))

    @property
    def prefix_producer(self) -> Phase:
        """The phase that computes the actor's prefixes."""
        return Phase.PREFILL if self.local_engine else Phase.ACTOR_PREFIX

    def activations_of(self, degree: int, *, sequence_parallel: bool) -> model_bytes.Activations:
        """What passes of this step save, on one of `degree` ranks."""
        return model_bytes.Activations(self.model, self.dtype_bytes, degree, sequence_parallel, self.kernels)

    @property
    def response_batch(self) -> int:
        """Response tokens of one micro-batch: whole responses within the budget, one at least, of one pack."""
        responses = max(1, self.micro_batch_tokens // self.response_tokens)
        return min(responses, self.pack_prompts * self.generations) * self.response_tokens
