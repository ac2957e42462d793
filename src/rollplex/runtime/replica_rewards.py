"""Rewards of a replica whose ranks hold one model together: its first rank calls the functions, the others are told.

All ranks must see a reward come at the same place in their work, since what they do next has sums in it. That place is
the end of the rollout: until then rewards run beside decoding as ever, and nobody asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rollplex.errors import RollplexError
from rollplex.parallel.team import Team
from rollplex.tasks.rewards import GroupScores, PendingScores, RewardRunner, TrainerState
from rollplex.types import Group


class ReplicaRewards:
    """RewardRunner for a rank of `team`."""

    def __init__(self, runner: RewardRunner, team: Team):
        self._runner, self._team = runner, team
        self._open: list[SharedScores] = []

    def submit(self, group: Group, texts: Sequence[str], state: TrainerState) -> SharedScores:
        """As RewardRunner; all ranks must submit the same groups in the same order."""
        own = self._runner.submit(group, texts, state) if self._team.place == 0 else None
        scores = SharedScores(self, group, own)
        self._open.append(scores)
        return scores

    def settle(self) -> None:
        """Wait for all rewards that were submitted and tell them to all ranks, errors too. All ranks must call it; with
        nothing submitted since it does nothing."""
        if not self._open:
            return
        opened, self._open = self._open, []
        limit_s = self.longest_wait_s(len(opened))
        outcomes = [scores.own_outcome(limit_s) for scores in opened]
        ids = [scores.group.rollout_id for scores in opened]
        for scores, outcome in zip(opened, self._team.of_place_0(outcomes, f"rewards of rollouts {ids}"), strict=True):
            assert outcome is not None  # the first rank has one for each
            scores.tell(outcome)

    def longest_wait_s(self, num_groups: int) -> float:
        """As RewardRunner."""
        return self._runner.longest_wait_s(num_groups)

    def close(self) -> None:
        """As RewardRunner."""
        self._runner.close()


class SharedScores:
    """PendingScores that come with `ReplicaRewards.settle`."""

    def __init__(self, rewards: ReplicaRewards, group: Group, own: PendingScores | None):
        self.group, self.submitted = group, time.monotonic()
        self._rewards, self._own = rewards, own
        self._outcome: GroupScores | RollplexError | None = None
        self._listeners: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether all ranks have been told."""
        return self._outcome is not None

    def failed(self) -> bool:
        """Whether all ranks have been told of an error."""
        return isinstance(self._outcome, RollplexError)

    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener` when all ranks have been told (now, if they have already)."""
        if self.done():
            listener()
        else:
            self._listeners.append(listener)

    def result(self, timeout_s: float) -> GroupScores:
        """The rewards, or what the first rank raised in their place. The deadline is that of `settle`."""
        if self._outcome is None:
            self._rewards.settle()
        if isinstance(self._outcome, RollplexError):
            raise self._outcome
        assert self._outcome is not None  # just told
        return self._outcome

    def own_outcome(self, timeout_s: float) -> GroupScores | RollplexError | None:
        """What this rank found itself; None: it asks no reward function."""
        if self._own is None:
            return None
        try:
            return self._own.result(timeout_s)
        except RollplexError as error:
            return error

    def tell(self, outcome: GroupScores | RollplexError) -> None:
        """What the first rank found."""
        self._outcome = outcome
        for listener in self._listeners:
            listener()
