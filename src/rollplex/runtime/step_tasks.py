"""What each task of a step does with the model: the bodies that the in-process executor runs.

Holds everything of one rollout between its tasks: prefixes, responses, rewards, log-probs. The order is the schedule's;
wrong orders fail in what they read (a prefix that was not computed, stale weights), never silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from rollplex.config import Config
from rollplex.errors import StateError
from rollplex.memory.states import ResidencyStates
from rollplex.models.policy import Policy
from rollplex.models.prefix import Activations, PrefixPack, compute_prefix
from rollplex.parallel.team import Team
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.engines import Engines
from rollplex.runtime.collect import Collector, PendingGroup, RawGroup, Rollout, Slot
from rollplex.runtime.replica_rewards import ReplicaRewards
from rollplex.runtime.run_memory import RunMemory
from rollplex.runtime.step_groups import Judged, advantages_of, of_all_replicas, scored
from rollplex.runtime.stopwatch import Stopwatch
from rollplex.runtime.units import Unit
from rollplex.schedule.spec import AdvantageScope, Phase, PrefixMode, StepSpec, Task
from rollplex.schedule.spec_from_config import prefix_mode
from rollplex.tasks.rewards import TrainerState
from rollplex.train.correction import MismatchStats, merge_stats
from rollplex.train.kl import response_kl
from rollplex.train.loss import LossTotals
from rollplex.train.metric_sums import MetricSums, merge_metrics
from rollplex.train.microbatch import counts_in_loss
from rollplex.train.optimizer import OptimizerStep
from rollplex.train.prefix_book import PackUse
from rollplex.train.update import FrozenLogps, Logps, PassResult, Updater, update_metrics
from rollplex.types import Group, ScoredGroup


@dataclass
class _Prefixes:
    """Prefix passes of one unit that are alive."""

    rollout: PackUse | None = None  # what the engine decodes on; with shared prefixes the actor's own
    actor: PackUse | None = None
    reference: PackUse | None = None


@dataclass
class _OptimizerStep:
    """One optimizer step in the making."""

    spec: StepSpec
    first_epoch: bool
    totals: LossTotals | None = None  # set by the first response pass
    deferred: bool = False
    results: list[PassResult] = field(default_factory=list)


class StepTasks:
    """`executor.TaskBodies` for one rollout with all its optimizer steps. Groups of the schedule are `units`."""

    def __init__(
        self,
        *,
        policy: Policy,
        updater: Updater,
        collector: Collector,
        engines: Engines,
        params: SamplingParams,
        config: Config,
        states: ResidencyStates,
        memory: RunMemory,
        units: Sequence[Unit],
        slots: Sequence[Slot],
        team: Team,
        state: TrainerState,
        watch: Stopwatch,
    ):
        self.policy, self.updater, self.collector, self.config, self.units = policy, updater, collector, config, units
        self.mode = prefix_mode(config)
        self._residency, self._activations = memory.residency, memory.prefix_activations
        self.states = states  # who reads and who writes the weights, whatever thread it is in
        self.raw: dict[int, RawGroup] = {}  # complete groups with their rewards, by rollout id
        self.loss_scale = 1.0  # of the last optimizer step, where its totals were not known from the start
        self._watch = watch
        self._prefixes = [_Prefixes() for _ in units]
        self._pending: list[dict[int, PendingGroup]] = [{} for _ in units]
        self._unit_of = {slot.rollout_id: number for number, unit in enumerate(units) for slot in unit.slots}
        self._slots, self._team = {slot.rollout_id: slot for slot in slots}, team  # of all replicas; units: of this one
        self._everyone: list[Judged] | None = None
        self._engines, self._params, self._state = engines, params, state
        self._rollout: Rollout | None = None  # opened by the first prompt: groups may have been sampled before
        self._old: dict[int, tuple[torch.Tensor, ...]] = {}
        self._ref: dict[int, tuple[torch.Tensor, ...]] = {}
        self._scored: dict[int, ScoredGroup] = {}
        self._began_s: dict[int, float] = {}  # decoding of a unit
        self._metrics: list[MetricSums] = []
        self._stats: list[MismatchStats] = []
        self._done: list[OptimizerStep] = []
        self._step: _OptimizerStep | None = None

    def begin(self, spec: StepSpec) -> None:
        """The next optimizer step; the groups of `spec` are this rollout's units."""
        self._step = _OptimizerStep(spec, first_epoch=len(self._done) < self.config.algorithm.steps_per_generation)

    def adopt(self, raw: RawGroup, pack: PackUse | None) -> None:
        """Take over a complete, scored group of an earlier round, with its prefix if it can be trained on."""
        self.raw[raw.group.rollout_id] = raw
        unit = self._unit_of[raw.group.rollout_id]
        self._prefixes[unit].actor = pack

    def actor_prefix_of(self, unit: int) -> PackUse | None:
        """The prefix of a unit's update, as far as it is there."""
        return self._prefixes[unit].actor

    # executor.TaskBodies

    def run(self, task: Task) -> None:
        """Any task but DECODE and REWARD."""
        bodies: dict[Phase, Callable[[int], None]] = {
            Phase.PREFILL: self._prefill,
            Phase.REF_PREFIX: self._ref_prefix,
            Phase.ACTOR_PREFIX: self._actor_prefix,
            Phase.REF_RESPONSE: self._ref_response,
            Phase.ACTOR_RESPONSE: self._actor_response,
            Phase.PREFIX_BACKWARD: self._prefix_backward,
        }
        if task.group is not None:
            with self._during(task.phase), self.states.reading(str(task)):
                bodies[task.phase](task.group)
        elif task.phase is Phase.OPTIMIZER:
            with self._during(task.phase):
                self._optimizer()
        elif self._weights_stay():  # PUBLISH. Engines that take weights in this process do in begin_decode.
            self._engines.begin_publish()

    def begin_decode(self, group: int) -> None:
        """Queue the unit's responses."""
        if self._rollout is None:
            with self._watch.phase(Phase.PUBLISH):  # engines with weights of their own take the new ones now
                engine = self._engines.open(self._params, self._place)
            self._rollout = Rollout(self.collector, engine, self._params.num_generations, self._state)
        self._began_s[group] = self._watch.now()
        for slot in self.units[group].slots:
            self._rollout.admit(slot, self.policy.weight_version)

    def decode_iteration(self) -> list[int]:
        """One token for every live response; units whose last response it was. Rewards of a prompt's responses start
        with the last of them, before its unit is complete."""
        if self._rollout is None:
            raise StateError("no group was handed to the engine")
        with self._during(Phase.DECODE), self.states.generating("decode"):
            complete = self._rollout.step()
        ended = []
        for pending in complete:
            unit = self._unit_of[pending.group.rollout_id]
            self._pending[unit][pending.group.rollout_id] = pending
            self._watch.record(
                Phase.DECODE,
                "decode",
                self._began_s[unit],
                pending.scores.submitted,
                group=pending.group.rollout_id,
            )
            if len(self._pending[unit]) == len(self.units[unit].slots):
                ended.append(unit)
                self._release_rollout(unit)
        if all(len(pending) == len(unit.slots) for pending, unit in zip(self._pending, self.units, strict=True)):
            self._rollout = None  # with the engine's caches: the update needs the memory
            self._engines.sleep()
        return ended

    def begin_reward(self, group: int, listener: Callable[[], None]) -> None:
        """Rewards run already; be told of their ends. Ranks that must hear of them together do once all is decoded."""
        for pending in self._pending[group].values():
            pending.scores.notify(listener)
        if self._rollout is None and isinstance(self.collector.rewards, ReplicaRewards):
            with self._watch.phase(Phase.REWARD, traced=False):
                self.collector.rewards.settle()

    def reward_done(self, group: int) -> bool:
        """Whether all rewards of the unit are there, or one has failed."""
        scores = [pending.scores for pending in self._pending[group].values()]
        return any(score.failed() for score in scores) or all(score.done() for score in scores)

    def end_reward(self, group: int) -> None:
        """Take the unit's rewards. Raises what the reward function raised, or DeadlineError."""
        for raw in self.collector.scored(list(self._pending[group].values())):
            self.raw[raw.group.rollout_id] = raw
            begin_s = self._pending[group][raw.group.rollout_id].scores.submitted
            self._watch.record(
                Phase.REWARD, "reward", begin_s, begin_s + raw.scores.seconds, group=raw.group.rollout_id
            )

    def reward_deadline_s(self) -> float:
        """Seconds after which all rewards of this rollout are there or overdue."""
        return self.collector.rewards.longest_wait_s(len(self._unit_of))

    def label(self, task: Task) -> int | None:
        """The rollout id of the unit's first prompt."""
        return None if task.group is None else self.units[task.group].rollout_ids[0]

    # results

    def everyone(self) -> list[Judged]:
        """All complete groups of the step by rollout id, the order in which their prompts came. All replicas tell each
        other theirs the first time."""
        if self._everyone is None:
            own = [self._judged(rollout_id) for rollout_id in sorted(self._unit_of)]
            self._everyone = of_all_replicas(own, self._slots, self._team)
        return self._everyone

    def update_metrics(self) -> dict[str, float]:
        """Of all optimizer steps so far."""
        own = (merge_metrics(self._metrics).on_host(), merge_stats(self._stats))
        parts, stats = zip(*self._team.of_replicas([own], "metrics of all replicas"), strict=True)
        return update_metrics(parts, stats, self._done, loss_scale=self.loss_scale)

    # phases

    def _prefill(self, unit: int) -> None:
        """The engine's prompt pass; with shared prefixes it is the update's own. Engines that compute prompts
        themselves do so when they are handed a group."""
        if not self._engines.reads_prefixes:
            return
        if self.mode is not PrefixMode.SHARED:
            self._prefixes[unit].rollout = self._compute(self.policy, unit, "none", copies=1)
            return
        # Later optimizer steps find the weights moved: their prefixes are for decoding and scoring only.
        first = self.units[unit].minibatch == 0
        use = self._compute(self.policy, unit, self._activations if first else "none", copies=1)
        self._prefixes[unit].rollout = self._prefixes[unit].actor = use

    def _ref_prefix(self, unit: int) -> None:
        assert self.updater.reference is not None  # the spec has no such task otherwise
        policy = self.updater.reference.policy
        self._prefixes[unit].reference = self._compute(policy, unit, "none", copies=self._copies)

    def _actor_prefix(self, unit: int) -> None:
        held = self._prefixes[unit].actor
        if held is not None and not held.pack.consumed and held.pack.weight_version == self.policy.weight_version:
            return  # taken over from the round that sampled the group
        learning = unit in self._current().spec.learning
        activations = self._activations if learning else "none"
        self._prefixes[unit].actor = self._compute(self.policy, unit, activations, copies=self._copies)

    def _ref_response(self, unit: int) -> None:
        """Log-probs under weights that do not move: old ones where wanted, and the reference's."""
        held = self._prefixes[unit]
        if self.updater.needs_old:
            self._old |= self._score(self.policy, unit, held.actor)
            if held.actor is not None and unit not in self._current().spec.learning:  # stale when its turn comes
                held.actor.pack.release()
                held.actor = None
        if self.updater.reference is not None:
            self._ref |= self._score(self.updater.reference.policy, unit, held.reference)
            if held.reference is not None:
                held.reference.pack.release()
                held.reference = None

    def _actor_response(self, unit: int) -> None:
        step = self._current()
        if step.totals is None:
            self._fix_totals(step)
        assert step.totals is not None  # just set
        use = self._checked(self._prefixes[unit].actor, unit)
        step.results += self.updater.respond(use, self._scored_of(unit), self._frozen(), step.totals)

    def _prefix_backward(self, unit: int) -> None:
        use = self._checked(self._prefixes[unit].actor, unit)
        assert use is not None  # whole sequences have no such task
        self.updater.push_prefix(use, self._scored_of(unit))
        self._prefixes[unit].actor = None

    def _optimizer(self) -> None:
        step = self._current()
        groups = [scored for unit in step.spec.learning for scored in self._scored_of(unit)]
        assert step.totals is not None  # a step learns from at least one group
        self.loss_scale = 1.0
        if step.deferred:
            self.loss_scale = self.updater.totals(groups).deferred_scale(self.updater.settings.loss_type)
        who = f"optimizer step {self.updater.optimizer.num_steps + 1}"
        with self.states.writing(who), self._engines.writing(who):
            self._done.append(self.updater.apply(groups, scale=self.loss_scale))
        self._metrics += [metrics for metrics, _ in step.results]
        self._stats += [stats for _, stats in step.results] if step.first_epoch else []

    # parts of phases

    def _weights_stay(self) -> bool:
        """Whether the next rollout is of the weights as they are now, and there is one."""
        last = len(self._done) == self._current().spec.optimizer_steps
        return last and self._state.global_step + 1 < self._state.max_steps

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext() if self._residency is None else self._residency.during(phase)

    @property
    def _copies(self) -> int:
        """How often a pass of the update or the reference computes each prompt."""
        return self.config.rollout.num_generations if self.mode is PrefixMode.PER_RESPONSE else 1

    def _compute(self, policy: Policy, unit: int, activations: Activations, *, copies: int) -> PackUse:
        slots = self.units[unit].slots
        pack = compute_prefix(policy, [slot.spec for slot in slots for _ in range(copies)], activations)
        numbers = {slot.rollout_id: number * copies for number, slot in enumerate(slots)}
        return PackUse(pack, numbers, per_response=copies > 1)

    def _place(self, rollout_id: int, _spec: object) -> tuple[PrefixPack, int]:
        """The engine's PrefixSource."""
        use = self._prefixes[self._unit_of[rollout_id]].rollout
        if use is None:
            raise StateError(f"no prefix was computed for rollout id {rollout_id}")
        return use.pack, use.numbers[rollout_id]

    def _release_rollout(self, unit: int) -> None:
        """The engine is done with a unit: prefixes that nobody else reads go."""
        held = self._prefixes[unit]
        if held.rollout is not None and held.rollout is not held.actor:
            held.rollout.pack.release()
        held.rollout = None

    def _checked(self, use: PackUse | None, unit: int) -> PackUse | None:
        """What response passes of a unit read; None: whole sequences. Raises StateError where a pack is wanted."""
        if self.mode is not PrefixMode.WHOLE and use is None:
            raise StateError(f"no prefix was computed for rollout ids {self.units[unit].rollout_ids}")
        return use

    def _score(self, policy: Policy, unit: int, use: PackUse | None) -> Logps:
        groups = [self._sampled(rollout_id) for rollout_id in self.units[unit].rollout_ids]
        checked = self._checked(use, unit)
        return self.updater.score(policy, groups, None if checked is None else [checked])

    def _is_sampled(self, rollout_id: int) -> bool:
        return rollout_id in self.raw or rollout_id in self._pending[self._unit_of[rollout_id]]

    def _sampled(self, rollout_id: int) -> Group:
        """A group whose responses are there, with or without its rewards."""
        if rollout_id in self.raw:
            return self.raw[rollout_id].group
        pending = self._pending[self._unit_of[rollout_id]]
        if rollout_id not in pending:
            raise StateError(f"the responses of rollout id {rollout_id} are not all sampled yet")
        return pending[rollout_id].group

    def _frozen(self) -> FrozenLogps:
        old = self._old if self.updater.needs_old else None
        return FrozenLogps(old, self._ref if self.updater.reference is not None else None)

    def _scored_of(self, unit: int) -> list[ScoredGroup]:
        """The unit's groups with advantages: from their own rewards, or from all where the batch decides."""
        ids = self.units[unit].rollout_ids
        if ids[0] not in self._scored:
            by_batch = self._current().spec.advantage is AdvantageScope.BATCH
            groups = self.everyone() if by_batch else [self._judged(rollout_id) for rollout_id in ids]
            advantages = advantages_of(groups, self.config.algorithm)
            self._scored |= {item.group.rollout_id: item for item in scored(groups, advantages)}
        return [self._scored[rollout_id] for rollout_id in ids]

    def _judged(self, rollout_id: int) -> Judged:
        """A group whose rewards, and KL if it is part of them, are known."""
        algorithm, kl = self.config.algorithm, None
        if algorithm.kl_in_reward:
            kl = response_kl(self._old[rollout_id], self._ref[rollout_id], algorithm.kl_estimator)
        return Judged(self.raw[rollout_id], kl)

    def _fix_totals(self, step: _OptimizerStep) -> None:
        """Normalisation of this optimizer step's loss: known when all responses are, else one factor at the end.

        Rewards do not matter here: were they waited for, the last bits would depend on how long they take.
        """
        learning = [slot.rollout_id for unit in step.spec.learning for slot in self.units[unit].slots]
        if not all(map(self._is_sampled, self._unit_of)):
            if step.spec.optimizer_steps > 1:
                raise StateError(
                    "a group would be trained on before all are sampled, with several optimizer steps per rollout: "
                    "the schedule must wait for every DECODE"
                )
            step.deferred = True
            step.totals = LossTotals.deferred(len(learning) * self.config.rollout.num_generations)
            return
        masked = self.config.algorithm.mask_truncated_completions
        counted = [
            len(response.token_ids)
            for rollout_id in self._unit_of
            for response in self._sampled(rollout_id).responses
            if counts_in_loss(response, mask_truncated=masked)
        ]
        own = [ScoredGroup(group, (), {}, (0.0,) * len(group.responses)) for group in map(self._sampled, learning)]
        parts = self.config.algorithm.steps_per_generation
        step.totals = self.updater.totals(own, rollout_tokens=sum(counted), num_minibatches=parts)

    def _current(self) -> _OptimizerStep:
        if self._step is None:
            raise StateError("no optimizer step was begun")
        return self._step
