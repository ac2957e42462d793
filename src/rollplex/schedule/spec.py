"""What one optimizer step consists of: its tasks, what each needs, and what each group holds in memory for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from rollplex.errors import ConfigError


class Phase(StrEnum):
    """What a step is made of: the first eight run per group, the last two once (needs: step.py)."""

    PREFILL = "prefill"  # the rollout engine's own prompt pass
    DECODE = "decode"  # all responses of a group; done the moment its last response is
    REWARD = "reward"
    REF_PREFIX = "ref_prefix"  # the reference's prompt pass
    ACTOR_PREFIX = "actor_prefix"  # the prompt pass that the update reads
    REF_RESPONSE = "ref_response"  # log-probs under weights that do not move: the reference's, and old ones if wanted
    ACTOR_RESPONSE = "actor_response"  # response passes with loss and backward, up to the prefix boundary
    PREFIX_BACKWARD = "prefix_backward"  # the one backward through the prompt
    OPTIMIZER = "optimizer"
    PUBLISH = "publish"  # new weights to the rollout engine


PER_STEP = (Phase.OPTIMIZER, Phase.PUBLISH)
PREFIXES = (Phase.REF_PREFIX, Phase.ACTOR_PREFIX)
UPDATE_PASSES = (Phase.ACTOR_PREFIX, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD)
REFERENCE = (Phase.REF_PREFIX, Phase.REF_RESPONSE)
_ROLLOUT = (Phase.PREFILL, Phase.DECODE, Phase.REWARD)


class PrefixMode(StrEnum):
    """How often the update computes a prompt."""

    SHARED = "shared"  # once, for all its responses (train.share_prefix: on)
    PER_RESPONSE = "per_response"  # once per response, in passes of its own: hoisting without sharing, an ablation
    WHOLE = "whole"  # once per response, as part of its pass: no prefix phases (train.share_prefix: off)


class AdvantageScope(StrEnum):
    """Which rewards an advantage is made from."""

    GROUP = "group"
    BATCH = "batch"  # all rewards of the rollout: algorithm.scale_rewards=batch, loss_type=reinforce_pp


class Task(NamedTuple):
    """One phase of one group, or of the step (group None). Example: Task(Phase.DECODE, 3)

    A tuple, since a simulated run hashes tasks by the million.
    """

    phase: Phase
    group: int | None = None

    def __str__(self) -> str:
        if self.phase is Phase.OPTIMIZER and self.group is not None:
            return f"{self.phase} of unit {self.group}"  # StepSpec.unit
        return str(self.phase) if self.group is None else f"{self.phase} of group {self.group}"


@dataclass(frozen=True, slots=True)
class Hold:
    """What each group holds from the launch of `producer` to the end of the last of `readers` (and of the producer).

    Phases that the step does not have are left out; without its producer there is no such object.
    Example: Hold("ref boundary", Phase.REF_PREFIX, (Phase.REF_RESPONSE,), (4096, 2048, 2048))
    """

    name: str
    producer: Phase
    readers: tuple[Phase, ...]  # empty: workspace of the producer alone
    nbytes: tuple[int, ...]  # per group


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One group's share of a `Hold`, in tasks."""

    name: str
    producer: Task
    users: frozenset[Task]  # producer and readers; when all are done the bytes are free
    nbytes: int


@dataclass(frozen=True)
class StepSpec:
    """One optimizer step over groups 0 .. num_groups - 1.

    A group is what the executor hands over as one unit: a prompt with its responses. A rollout with several optimizer
    steps is several specs: the first samples all groups and trains on `trained`; later ones (`rollout` off) compute
    their prefixes anew, since the weights have moved (spec_from_config.py).

    Raises ConfigError for a description that contradicts itself.
    """

    num_groups: int
    rollout: bool = True  # off: all groups are complete, scored and rewarded; only the update is left
    trained: tuple[int, ...] | None = None  # groups that this optimizer step learns from; None: all
    reference: bool = False  # algorithm.beta above 0
    old_logps: bool = False  # log-probs of the sampling weights are taken before the update, on the actor's prefixes
    prefix: PrefixMode = PrefixMode.SHARED
    # In one process the engine decodes on the actor's own prefixes (train/prefix_book.py): PREFILL is that pass.
    prefill_is_actor_prefix: bool = False
    advantage: AdvantageScope = AdvantageScope.GROUP
    optimizer_steps: int = 1  # of the whole rollout
    resampling: bool = False  # groups that teach nothing are replaced once their rewards are known
    # Groups per optimizer step inside one rollout (RolloutPipe's U = B / K), in the order in which they are consumed:
    # OPTIMIZER is then Task(OPTIMIZER, 0), (OPTIMIZER, 1), ..; PUBLISH comes after all groups. None: one step.
    unit: int | None = None
    holds: tuple[Hold, ...] = ()

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.optimizer_steps < 1:
            raise ConfigError(
                f"a step needs groups and optimizer steps, found {self.num_groups} and {self.optimizer_steps}"
            )
        strangers = [g for g in self.learning if not 0 <= g < self.num_groups]
        if strangers or not self.learning or len(set(self.learning)) != len(self.learning):
            raise ConfigError(f"trained is {self.trained}, needed distinct groups of 0 .. {self.num_groups - 1}")
        if self.prefill_is_actor_prefix and (self.prefix is not PrefixMode.SHARED or not self.rollout):
            raise ConfigError(
                f"prefill_is_actor_prefix needs shared prefixes and a rollout, found prefix {self.prefix} and rollout "
                f"{self.rollout}: the engine's one pass per prompt is then not what the update reads"
            )
        self._check_unit()
        for hold in self.holds:
            if len(hold.nbytes) != self.num_groups or min(hold.nbytes) < 0:
                raise ConfigError(
                    f"hold {hold.name!r} needs bytes for each of {self.num_groups} groups, found {hold.nbytes}"
                )
            if set(PER_STEP) & {hold.producer, *hold.readers}:
                raise ConfigError(f"hold {hold.name!r} is a group's; {' and '.join(PER_STEP)} have no group")

    def _check_unit(self) -> None:
        """Raises ConfigError where weights that move within a rollout contradict the rest."""
        if self.unit is None:
            return
        if self.unit < 1 or len(self.learning) != self.unit * self.optimizer_steps:
            raise ConfigError(
                f"units of {self.unit} groups and {self.optimizer_steps} optimizer steps do not make the "
                f"{len(self.learning)} groups that are learnt from: each is consumed by exactly one step"
            )
        batch = self.advantage is AdvantageScope.BATCH
        if self.old_logps or self.prefill_is_actor_prefix or not self.rollout or batch:
            raise ConfigError(
                "the update's weights move while groups still decode (unit): old log-probs must then come from the "
                "engine (old_logps off), prefixes from the trainer (prefill_is_actor_prefix off), advantages from the "
                "group's own rewards, and the rollout must be part of the step"
            )

    @cached_property
    def learning(self) -> tuple[int, ...]:
        """Groups that this optimizer step learns from."""
        return tuple(range(self.num_groups)) if self.trained is None else self.trained

    @cached_property
    def optimizers(self) -> tuple[Task, ...]:
        """The optimizer steps, in their order: one, or one per unit."""
        if self.unit is None:
            return (Task(Phase.OPTIMIZER),)
        return tuple(Task(Phase.OPTIMIZER, number) for number in range(self.optimizer_steps))

    @cached_property
    def tasks(self) -> Mapping[Task, None]:
        """All tasks of the step, as an ordered set: group after group, then OPTIMIZER and PUBLISH."""
        found = dict.fromkeys(Task(phase, g) for g in range(self.num_groups) for phase in self._phases(g))
        return found | dict.fromkeys([*self.optimizers, Task(Phase.PUBLISH)])

    @cached_property
    def by_stage(self) -> tuple[Task, ...]:
        """All tasks, stage after stage: rollout of all groups, then scoring, then the update; group by group."""
        scoring = (*PREFIXES, Phase.REF_RESPONSE) if self.old_logps else REFERENCE
        stages = (_ROLLOUT, scoring, UPDATE_PASSES)
        ordered = (Task(phase, group) for stage in stages for group in range(self.num_groups) for phase in stage)
        return tuple(dict.fromkeys(task for task in [*ordered, *self.tasks] if task in self.tasks))

    @cached_property
    def by_group(self) -> tuple[Task, ...]:
        """All tasks, group after group, each from its prefill to its prefix backward."""
        return tuple(self.tasks)

    def needs(self, task: Task) -> tuple[Task, ...]:
        """Tasks that must be done before `task` starts. Raises KeyError for one that is not of this step."""
        return self._needs[task]

    def group_task(self, phase: Phase, group: int) -> Task | None:
        """The task that does `phase` for `group`: PREFILL for ACTOR_PREFIX where that is one pass; None: not needed."""
        if phase is Phase.ACTOR_PREFIX and self.prefill_is_actor_prefix:
            phase = Phase.PREFILL
        task = Task(phase, group)
        return task if task in self.tasks else None

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """What groups hold, group after group."""
        return tuple(self._lifetimes())

    @cached_property
    def needs_count(self) -> Mapping[Task, int]:
        """How many tasks each task needs."""
        return {task: len(self.needs(task)) for task in self.tasks}

    @cached_property
    def roots(self) -> tuple[Task, ...]:
        """Tasks that need nothing, group after group."""
        return tuple(task for task, count in self.needs_count.items() if not count)

    @cached_property
    def dependents(self) -> Mapping[Task, tuple[Task, ...]]:
        """Tasks that need each task: `needs` the other way round."""
        found: dict[Task, list[Task]] = {task: [] for task in self.tasks}
        for task in self.tasks:
            for need in self.needs(task):
                found[need].append(task)
        return {task: tuple(others) for task, others in found.items()}

    @cached_property
    def tasks_per_phase(self) -> Mapping[Phase, int]:
        """How many tasks each phase has."""
        return dict.fromkeys(Phase, 0) | Counter(task.phase for task in self.tasks)

    @property
    def last_pass(self) -> Phase:
        """The pass after which the update is done with a group."""
        return Phase.ACTOR_RESPONSE if self.prefix is PrefixMode.WHOLE else Phase.PREFIX_BACKWARD

    def bytes_started(self, task: Task) -> int:
        """What `task` begins to hold at its launch."""
        return sum(life.nbytes for life in self.started_by(task))

    def started_by(self, task: Task) -> tuple[Lifetime, ...]:
        """What `task` produces."""
        return self._started.get(task, ())

    def used_by(self, task: Task) -> tuple[Lifetime, ...]:
        """What `task` produces or reads."""
        return self._used.get(task, ())

    def _phases(self, group: int) -> Iterator[Phase]:
        split = self.prefix is not PrefixMode.WHOLE
        trained = group in self._learners
        scored = self.reference or self.old_logps
        wanted = {
            Phase.PREFILL: self.rollout,
            Phase.DECODE: self.rollout,
            Phase.REWARD: self.rollout,
            Phase.REF_PREFIX: self.reference and split,
            Phase.ACTOR_PREFIX: split and (trained or self.old_logps) and not self.prefill_is_actor_prefix,
            Phase.REF_RESPONSE: scored,
            Phase.ACTOR_RESPONSE: trained,
            Phase.PREFIX_BACKWARD: trained and split,
        }
        return (phase for phase, there in wanted.items() if there)

    @cached_property
    def _learners(self) -> frozenset[int]:
        return frozenset(self.learning)

    @cached_property
    def _needs(self) -> Mapping[Task, tuple[Task, ...]]:
        return {task: tuple(need for need in self._wishes(task) if need in self.tasks) for task in self.tasks}

    def _wishes(self, task: Task) -> Iterator[Task]:
        """Needs of `task`, tasks that the step does not have included."""
        if task.phase in PER_STEP:
            yield from self._step_wishes(task)
            return
        group = task.group
        actor_prefix = Phase.PREFILL if self.prefill_is_actor_prefix else Phase.ACTOR_PREFIX
        own: dict[Phase, tuple[Phase, ...]] = {
            Phase.DECODE: (Phase.PREFILL,),
            Phase.REWARD: (Phase.DECODE,),
            Phase.REF_RESPONSE: (Phase.DECODE, Phase.REF_PREFIX, *([actor_prefix] if self.old_logps else [])),
            Phase.ACTOR_RESPONSE: (Phase.DECODE, actor_prefix),
            Phase.PREFIX_BACKWARD: (Phase.ACTOR_RESPONSE,),
        }
        yield from (Task(phase, group) for phase in own.get(task.phase, ()))
        if task.phase is Phase.ACTOR_RESPONSE:
            judged = range(self.num_groups) if self.advantage is AdvantageScope.BATCH else (group,)
            for phase in (Phase.REWARD, Phase.REF_RESPONSE):  # both: a KL may be part of the reward
                yield from (Task(phase, other) for other in judged)

    def _step_wishes(self, task: Task) -> Iterator[Task]:
        """Needs of OPTIMIZER and PUBLISH. Which groups an optimizer step of a unit waits for, its state says: the first
        that were consumed (progress.py)."""
        rest = (other for other in self.tasks if other.phase not in PER_STEP)
        if self.unit is None:
            yield from rest if task.phase is Phase.OPTIMIZER else self.optimizers
        elif task.phase is Phase.PUBLISH:
            yield from rest
            yield self.optimizers[-1]
        elif task.group:
            yield self.optimizers[task.group - 1]

    def _lifetimes(self) -> Iterator[Lifetime]:
        for group in range(self.num_groups):
            for hold in self.holds:
                producer = self.group_task(hold.producer, group)
                if producer is None:
                    continue
                readers = [self.group_task(phase, group) for phase in hold.readers]
                users = frozenset([producer, *(task for task in readers if task is not None)])
                yield Lifetime(hold.name, producer, users, hold.nbytes[group])

    @cached_property
    def _started(self) -> Mapping[Task, tuple[Lifetime, ...]]:
        return _by_task((life.producer, life) for life in self.lifetimes)

    @cached_property
    def _used(self) -> Mapping[Task, tuple[Lifetime, ...]]:
        return _by_task((task, life) for life in self.lifetimes for task in life.users)


def _by_task(pairs: Iterable[tuple[Task, Lifetime]]) -> dict[Task, tuple[Lifetime, ...]]:
    found: dict[Task, list[Lifetime]] = {}
    for task, life in pairs:
        found.setdefault(task, []).append(life)
    return {task: tuple(lives) for task, lives in found.items()}
