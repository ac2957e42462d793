"""One rollout: prompts into complete, scored groups. Rewards of a group start the moment its last response is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.errors import EngineError
from rollplex.rollout.engine import RolloutEngine
from rollplex.runtime.replica_rewards import ReplicaRewards, SharedScores
from rollplex.tasks.rewards import GroupScores, PendingScores, RewardRunner, TrainerState
from rollplex.types import Example, Group, PromptSpec, Response


@dataclass(frozen=True, slots=True)
class Slot:
    """One prompt of a rollout."""

    rollout_id: int
    example: Example
    spec: PromptSpec


@dataclass(frozen=True, slots=True)
class RawGroup:
    """A complete group with its rewards, before advantages."""

    group: Group
    texts: tuple[str, ...]
    scores: GroupScores


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A complete group whose rewards are on their way."""

    group: Group
    texts: tuple[str, ...]
    scores: PendingScores | SharedScores


class Rollout:
    """Prompts that one engine decodes together. A group's rewards start with its last response."""

    def __init__(self, collector: Collector, engine: RolloutEngine, num_generations: int, state: TrainerState):
        self.collector, self.engine, self.num_generations, self.state = collector, engine, num_generations, state
        self._slots: dict[int, tuple[Slot, int]] = {}  # of open groups, with the weight version that samples them
        self._responses: dict[int, dict[int, Response]] = {}

    def admit(self, slot: Slot, weight_version: int) -> None:
        """Queue all responses of a prompt."""
        self._slots[slot.rollout_id] = (slot, weight_version)
        self._responses[slot.rollout_id] = {}
        self.engine.admit(slot.rollout_id, slot.spec)

    def step(self) -> list[PendingGroup]:
        """One engine iteration; the groups that it completed. Raises EngineError when the engine stops short."""
        complete = []
        for finished in self.engine.step():
            responses = self._responses[finished.rollout_id]
            responses[finished.response.index] = finished.response
            if len(responses) == self.num_generations:
                complete.append(self._close(finished.rollout_id))
        if self._slots and not self.engine.busy:
            raise EngineError(f"the engine ended without all responses of rollout ids {sorted(self._slots)}")
        return complete

    def _close(self, rollout_id: int) -> PendingGroup:
        slot, weight_version = self._slots.pop(rollout_id)
        responses = self._responses.pop(rollout_id)
        ordered = tuple(responses[index] for index in range(self.num_generations))
        group = Group(rollout_id, slot.example, slot.spec, ordered, weight_version)
        texts = self.collector.texts(group)
        return PendingGroup(group, texts, self.collector.rewards.submit(group, texts, self.state))


class Collector:
    """Completions into texts and rewards."""

    def __init__(self, tokenizer: Any, rewards: RewardRunner | ReplicaRewards):
        self.tokenizer, self.rewards = tokenizer, rewards

    def decode(
        self,
        engine: RolloutEngine,
        slots: Sequence[Slot],
        num_generations: int,
        weight_version: int,
        state: TrainerState,
    ) -> list[PendingGroup]:
        """Sample all responses of `slots` and nothing else meanwhile; groups in slot order, rewards on the way."""
        rollout = Rollout(self, engine, num_generations, state)
        for slot in slots:
            rollout.admit(slot, weight_version)
        complete: dict[int, PendingGroup] = {}
        while engine.busy:
            complete |= {pending.group.rollout_id: pending for pending in rollout.step()}
        return [complete[slot.rollout_id] for slot in slots]

    def texts(self, group: Group) -> tuple[str, ...]:
        """Decoded completions, special tokens left out."""
        ids = [list(response.token_ids) for response in group.responses]
        return tuple(self.tokenizer.batch_decode(ids, skip_special_tokens=True))

    def scored(self, pending: Sequence[PendingGroup]) -> list[RawGroup]:
        """Wait for the rewards, each with a deadline; for none of them where one has failed."""
        deadline_s = self.rewards.longest_wait_s(len(pending))
        for item in pending:
            if item.scores.failed():
                item.scores.result(deadline_s)  # raises
        return [RawGroup(item.group, item.texts, item.scores.result(deadline_s)) for item in pending]


def merged_log_metrics(raw: Sequence[RawGroup]) -> Mapping[str, float]:
    """Means of what reward functions logged with log_metric, and the count of calls over their deadline."""
    values: dict[str, list[float]] = {}
    for item in raw:
        for name, logged in item.scores.metrics.items():
            values.setdefault(name, []).extend(logged)
    metrics = {name: sum(logged) / len(logged) for name, logged in values.items() if logged}
    timeouts = sum(item.scores.timeouts for item in raw)
    return metrics | ({"rewards/timeouts": float(timeouts)} if timeouts else {})
