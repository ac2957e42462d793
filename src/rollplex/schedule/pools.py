"""Two pools of devices, one that samples and one that trains: `disaggregated` and `rolloutpipe`.

Lane DECODE is the rollout pool (engines prefill and decode there), lane MAIN the trainer pool: one slot is one replica,
which takes a group through all its passes, so groups of different replicas train at once. OPTIMIZER and PUBLISH are
all replicas together. All groups of a step are sampled under one version of the weights, whatever the order in which
they are complete: PUBLISH needs all of them.

What is handed from pool to pool is whole groups, since an advantage is made from a group's rewards:

    disaggregated  all groups, once the last is complete; in their own order
    rolloutpipe    complete-group pipelining (CGP): units of U = B / K groups, as they are complete, first in first out
                   frontier-group dispatch (FGD): only the first groups that are not decoded yet are admitted
Source: RolloutPipe, arXiv 2606.26997. There U groups are one optimizer step (`StepSpec.unit`); with one step for all
(unit None) the update is that of `serial`, up to the order of its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollplex.errors import ConfigError
from rollplex.schedule.spec import PREFIXES, REFERENCE, AdvantageScope, Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, StepState
from rollplex.schedule.turn import Turn


@dataclass(frozen=True)
class Disaggregated:
    """One pool after the other: while groups decode the trainer pool waits, and the other way round."""

    name = "disaggregated"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Refuses what two pools do not have."""
        check_pools(self.name, spec, limits)

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """Sampling; then, with all rewards there, training."""
        turn = Turn(state, state.spec.by_stage)
        turn.offer_rewards()
        offer_sampling(turn)
        offer_training(turn, *all_groups(turn.state))
        return tuple(turn.launches)


@dataclass(frozen=True)
class RolloutPipe:
    """Disaggregated, with groups handed over while others decode.

    cgp: hand over units of complete groups; off: all groups at once, as `disaggregated`.
    fgd: admit only the frontier, the `frontier` first groups that are not decoded; off: admit all, the engine's queue
        decides.
    unit: groups handed over together where the step says nothing (`StepSpec.unit`); a rest makes a smaller one.
    frontier: None: as many as a unit has, as in the paper.
    floor: groups that decode at least, frontier or not: decoding few at a time leaves an engine idle. Strict FGD: 0.
    aging: a group that so many later ones have overtaken counts no longer as part of the frontier, so that one long
        response does not hold back all others. None: it counts until it is decoded.
    """

    cgp: bool = True
    fgd: bool = True
    unit: int = 1
    frontier: int | None = None
    floor: int = 0
    aging: int | None = None

    name = "rolloutpipe"

    def __post_init__(self) -> None:
        if min(self.unit, 1 if self.frontier is None else self.frontier, 1 if self.aging is None else self.aging) < 1:
            raise ConfigError(f"unit, frontier and aging count groups, needed 1 or more: {self}")
        if self.floor < 0:
            raise ConfigError(f"floor is {self.floor} groups, needed 0 or more")

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Refuses what two pools do not have, and steps for which training on part of the groups is not exact."""
        check_pools(self.name, spec, limits)
        if self.cgp and (spec.advantage is AdvantageScope.BATCH or spec.resampling):
            raise ConfigError(
                "schedule 'rolloutpipe' trains on groups before all rewards are there, which advantages over the batch "
                "(scale_rewards=batch, reinforce_pp) and dynamic_sampling=resample need; use 'disaggregated'"
            )

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """Sampling as admitted; whole units of what is complete to the trainers."""
        turn = Turn(state, state.spec.by_stage)
        turn.offer_rewards()
        if self.fgd:
            self._offer_frontier(turn)
        else:
            offer_sampling(turn)
        offer_training(turn, *(self._handed_over(turn.state) if self.cgp else all_groups(turn.state)))
        return tuple(turn.launches)

    def _handed_over(self, state: StepState) -> tuple[Sequence[int], int]:
        """Complete groups in their order, and how many of them make whole units; all, once all are there."""
        count = len(state.complete)
        return state.complete, count if count == state.spec.num_groups else count - count % self._unit(state.spec)

    def _unit(self, spec: StepSpec) -> int:
        return self.unit if spec.unit is None else spec.unit

    def _offer_frontier(self, turn: Turn) -> None:
        """Groups are admitted in their order, so those that were are the first ones."""
        turn.offer_all(Phase.DECODE, Lane.DECODE)
        width = self.frontier or self._unit(turn.state.spec)
        aged = self._overtaken(turn.state) if self.aging is not None else 0
        for task in turn.pending(Phase.PREFILL):
            live = admitted(turn.state) - decoded(turn.state)
            if live - aged >= width and live >= self.floor:
                return
            if not turn.offer(task, Lane.DECODE):
                return

    def _overtaken(self, state: StepState) -> int:
        """Admitted groups that at least `aging` later ones have overtaken."""
        done = decoded(state)
        live = [g for g in range(admitted(state)) if not state.is_done(Task(Phase.DECODE, g))]
        later = [done - (group - rank) for rank, group in enumerate(live)]  # decoded ones that come after it
        return sum(count >= (self.aging or 0) for count in later)


def check_pools(name: str, spec: StepSpec, limits: Limits) -> None:
    """Raises ConfigError for a step that two pools cannot run."""
    if spec.prefill_is_actor_prefix:
        raise ConfigError(
            f"schedule {name!r} samples and trains on different devices: the engine's prefill cannot be the update's "
            "prefix pass (prefill_is_actor_prefix off)"
        )
    if spec.trained is not None or not spec.rollout:
        raise ConfigError(
            f"schedule {name!r} takes a rollout with all its optimizer steps as one step: say after how many groups "
            "each comes (StepSpec.unit) instead of which groups it learns from"
        )
    if limits.memory_bytes is not None:
        raise ConfigError(
            f"schedule {name!r} has two pools with memory of their own, Limits.memory_bytes counts one: leave it out "
            "and plan each pool by itself"
        )


def all_groups(state: StepState) -> tuple[Sequence[int], int]:
    """The groups in their own order, and how many of them are handed over: all once all are complete, none before."""
    count = state.spec.num_groups
    return range(count), count if len(state.complete) == count else 0


def admitted(state: StepState) -> int:
    """Groups that the engines were given."""
    return state.started(Phase.PREFILL)


def decoded(state: StepState) -> int:
    """Groups that the engines are done with."""
    return state.spec.num_groups - state.left(Phase.DECODE)


def offer_sampling(turn: Turn) -> None:
    """Every group to the engines, in order."""
    turn.offer_all(Phase.DECODE, Lane.DECODE)
    turn.offer_all(Phase.PREFILL, Lane.DECODE)


def offer_training(turn: Turn, groups: Sequence[int], count: int, *, publish: bool = True) -> None:
    """Passes of the first `count` of `groups` on free replicas, first in first out; OPTIMIZER and PUBLISH when no
    replica works.

    groups: an order that from turn to turn only grows, as `count` does. publish: whether PUBLISH may start.
    """
    if not count or not turn.has_slot(Lane.MAIN):
        return
    spec, progress = turn.state.spec, turn.progress
    chain = _chain(spec)
    for before, phase in reversed([*pairwise(chain)]):
        if progress.startable[phase]:
            _offer_on(turn, phase, progress.ended[before], len(progress.ended[before]))
    if spec.unit is not None:  # those of the next unit have to wait until the weights have moved
        count = min(count, spec.unit * (1 + spec.optimizer_steps - progress.left[Phase.OPTIMIZER]))
    if not progress.running_of[Phase.OPTIMIZER]:
        _offer_on(turn, chain[0], groups, count)
    for phase in (Phase.OPTIMIZER, Phase.PUBLISH):
        for task in turn.pending(phase) if progress.startable[phase] else ():
            if not progress.in_lane[Lane.MAIN] and (publish or phase is Phase.OPTIMIZER):
                turn.offer(task, Lane.MAIN)


def _chain(spec: StepSpec) -> list[Phase]:
    """What a replica does with a group, in this order; old log-probs are taken on the actor's prefix."""
    scoring = (*PREFIXES, Phase.REF_RESPONSE) if spec.old_logps else (*REFERENCE, Phase.ACTOR_PREFIX)
    return [p for p in (*scoring, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD) if spec.tasks_per_phase[p]]


def _offer_on(turn: Turn, phase: Phase, groups: Sequence[int], count: int) -> None:
    """`phase` of the first `count` groups, in this order, as far as replicas are free."""
    begun = turn.progress.started_of[phase]
    while begun < count and turn.has_slot(Lane.MAIN) and turn.offer(Task(phase, groups[begun]), Lane.MAIN):
        begun += 1
