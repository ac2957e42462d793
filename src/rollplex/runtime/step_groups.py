"""All groups of a step, those of other replicas too, and the advantages that follow from their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollplex.config_algorithm import AlgorithmConfig
from rollplex.parallel.team import Team
from rollplex.runtime.collect import RawGroup, Slot
from rollplex.tasks.rewards import GroupScores
from rollplex.train.advantage import Advantages, compute_advantages, estimator_of
from rollplex.train.microbatch import counts_in_loss
from rollplex.types import Group, Response, ScoredGroup


@dataclass(frozen=True, slots=True)
class Judged:
    """A complete group with its rewards, and the KL of its responses where that lowers them."""

    raw: RawGroup
    kl: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class _Told:
    """A group on its way to another process, which has the prompt itself."""

    rollout_id: int
    responses: tuple[Response, ...]
    weight_version: int
    texts: tuple[str, ...]
    scores: GroupScores
    kl: Sequence[float] | None


def share_of(slots: Sequence[Slot], team: Team, *, minibatches: int) -> list[Slot]:
    """The prompts of a step that this replica trains on: an equal run of each minibatch."""
    if team.replicas == 1:
        return list(slots)
    size = len(slots) // minibatches
    share = size // team.replicas
    firsts = [number * size + team.replica * share for number in range(minibatches)]
    return [slot for first in firsts for slot in slots[first : first + share]]


def of_all_replicas(own: Sequence[Judged], slots: Mapping[int, Slot], team: Team) -> list[Judged]:
    """The groups of all replicas by rollout id; slots: the prompts of all. Every process must call it."""
    if team.replicas == 1:
        return list(own)
    told = team.of_replicas([_told(judged) for judged in own], "responses and rewards of all replicas")
    return [_received(item, slots[item.rollout_id]) for item in sorted(told, key=lambda item: item.rollout_id)]


def advantages_of(groups: Sequence[Judged], algorithm: AlgorithmConfig) -> Advantages:
    """Advantages of `groups`: of all of a step where the batch decides."""
    masked = algorithm.mask_truncated_completions
    lengths = [
        [len(r.token_ids) if counts_in_loss(r, mask_truncated=masked) else 0 for r in judged.raw.group.responses]
        for judged in groups
    ]
    return compute_advantages(
        [judged.raw.scores.rewards for judged in groups],
        estimator=estimator_of(algorithm.loss_type),
        scale_rewards=algorithm.scale_rewards,
        beta=algorithm.beta,
        kl=[judged.kl for judged in groups if judged.kl is not None] if algorithm.kl_in_reward else None,
        lengths=lengths,
    )


def scored(groups: Sequence[Judged], advantages: Advantages) -> list[ScoredGroup]:
    """Groups with their advantages."""
    return [
        ScoredGroup(j.raw.group, j.raw.scores.rewards, j.raw.scores.parts, values, j.raw.scores.extras)
        for j, values in zip(groups, advantages.values, strict=True)
    ]


def _told(judged: Judged) -> _Told:
    group, raw = judged.raw.group, judged.raw
    return _Told(group.rollout_id, group.responses, group.weight_version, raw.texts, raw.scores, judged.kl)


def _received(told: _Told, slot: Slot) -> Judged:
    group = Group(told.rollout_id, slot.example, slot.spec, told.responses, told.weight_version)
    return Judged(RawGroup(group, told.texts, told.scores), told.kl)
