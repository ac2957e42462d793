"""What the busiest rollout device receives when new weights are published."""

from __future__ import annotations

from functools import cache

from rollplex.config import SharingConfig
from rollplex.models.shapes import ModelShape
from rollplex.models.shard_plan import Kind, shard_plan
from rollplex.planner.flops import ModelCounts
from rollplex.planner.parallel import Parallel
from rollplex.weights.layout import plan_sharing
from rollplex.weights.transfer import received_numel


def colocated_bytes(counts: ModelCounts, train: Parallel, rollout: Parallel) -> float:
    """Training's shards and the rollout's on the same devices: the rows that a device's rollout shard has and its
    training shard has not. The vision tower is whole on both sides. One degree must divide the other (ConfigError).

    A pipeline or experts spread over ranks: every rollout device lacks what other stages hold as well.
    """
    text, _ = rollout.parameters(counts)
    if train.pipeline > 1 or train.expert > 1 or rollout.pipeline > 1 or rollout.expert > 1:
        own = train.parameters(counts)[0]
        return max(0, text - own) * counts.dtype_bytes
    if train.tensor == rollout.tensor:
        return 0.0
    share = text * counts.dtype_bytes / _whole(counts.shape, rollout.tensor)
    return _received(counts.shape, train.tensor, rollout.tensor) * share


def disaggregated_bytes(counts: ModelCounts, rollout: Parallel) -> float:
    """Pools of their own: a rollout device receives its whole shard, tower included."""
    return sum(rollout.parameters(counts)) * counts.dtype_bytes


def _whole(shape: ModelShape, degree: int) -> float:
    return ModelCounts(shape).text_parameters / degree


@cache
def _received(shape: ModelShape, train_tp: int, rollout_tp: int) -> int:
    """Elements of a dense language model, by the exact copies of weights/transfer.py."""
    plan = plan_sharing(shard_plan(shape), SharingConfig(train_tp=train_tp, rollout_tp=rollout_tp))
    units = [unit.unit for unit in plan.units if unit.unit.kind is not Kind.VISION]
    return max(sum(received_numel(plan, unit, device) for unit in units) for device in range(plan.num_devices))
