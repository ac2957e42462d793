"""One rollout: prompts into complete, scored groups. Rewards of a group start the moment its last response is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.errors import EngineError
from rollplex.rollout.engine import RolloutEngine
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


class Collector:
    """Drives an engine to the end of a rollout while rewards run beside it."""

    def __init__(self, tokenizer: Any, rewards: RewardRunner):
        self.tokenizer, self.rewards = tokenizer, rewards

    def decode(
        self,
        engine: RolloutEngine,
        slots: Sequence[Slot],
        num_generations: int,
        weight_version: int,
        state: TrainerState,
    ) -> list[tuple[Group, tuple[str, ...], PendingScores]]:
        """Sample all responses of `slots`; groups in slot order, their rewards on the way."""
        by_id = {slot.rollout_id: slot for slot in slots}
        open_groups: dict[int, dict[int, Response]] = {slot.rollout_id: {} for slot in slots}
        complete: dict[int, tuple[Group, tuple[str, ...], PendingScores]] = {}
        for slot in slots:
            engine.admit(slot.rollout_id, slot.spec)
        while engine.busy:
            for finished in engine.step():
                responses = open_groups[finished.rollout_id]
                responses[finished.response.index] = finished.response
                if len(responses) == num_generations:
                    slot = by_id[finished.rollout_id]
                    ordered = tuple(responses[index] for index in range(num_generations))
                    group = Group(slot.rollout_id, slot.example, slot.spec, ordered, weight_version)
                    texts = self.texts(group)
                    complete[slot.rollout_id] = (group, texts, self.rewards.submit(group, texts, state))
        missing = [i for i in by_id if i not in complete]
        if missing:
            raise EngineError(f"the engine ended without all responses of rollout ids {missing}")
        return [complete[slot.rollout_id] for slot in slots]

    def texts(self, group: Group) -> tuple[str, ...]:
        """Decoded completions, special tokens left out."""
        ids = [list(response.token_ids) for response in group.responses]
        return tuple(self.tokenizer.batch_decode(ids, skip_special_tokens=True))

    def scored(self, pending: Sequence[tuple[Group, tuple[str, ...], PendingScores]]) -> list[RawGroup]:
        """Wait for the rewards, each with a deadline."""
        deadline_s = self.rewards.longest_wait_s(len(pending))
        return [RawGroup(group, texts, scores.result(deadline_s)) for group, texts, scores in pending]


def merged_log_metrics(raw: Sequence[RawGroup]) -> Mapping[str, float]:
    """Means of what reward functions logged with log_metric, and the count of calls over their deadline."""
    values: dict[str, list[float]] = {}
    for item in raw:
        for name, logged in item.scores.metrics.items():
            values.setdefault(name, []).extend(logged)
    metrics = {name: sum(logged) / len(logged) for name, logged in values.items() if logged}
    timeouts = sum(item.scores.timeouts for item in raw)
    return metrics | ({"rewards/timeouts": float(timeouts)} if timeouts else {})
