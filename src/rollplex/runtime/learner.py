"""One on-policy step in one process: prompts -> prefixes -> rollout -> rewards -> advantages -> new weights.

The learner describes the step (schedule/spec.py), gives it its work (step_tasks.py) and lets a schedule drive the
executor. With `share_prefix` the prompt pass happens once: the same pack serves decoding, scoring and, for the first
optimizer step, the update. Nothing in here knows where prompts come from or where results are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rollplex.config import Config
from rollplex.errors import ConfigError, SamplingExhausted
from rollplex.memory.allocations import AllocationCounter, held_bytes
from rollplex.memory.ledger import Ledger
from rollplex.memory.states import ResidencyStates
from rollplex.models.policy import Policy
from rollplex.parallel.team import ALONE, Team
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.engines import Engines, local_engines
from rollplex.runtime.collect import Collector, RawGroup, Slot, merged_log_metrics
from rollplex.runtime.device import DeviceLanes, allocated_bytes, device_lanes, kept_threads
from rollplex.runtime.executor import InProcessExecutor, WindowThread, prompt_switches
from rollplex.runtime.run_memory import Counted, RunMemory, run_memory, step_ledger
from rollplex.runtime.step_groups import advantages_of, scored, share_of
from rollplex.runtime.step_metrics import completion_metrics, token_counts
from rollplex.runtime.step_tasks import StepTasks
from rollplex.runtime.stopwatch import Stopwatch
from rollplex.runtime.units import Unit, cut_units
from rollplex.schedule.overlap import OverlapControl, StepSample
from rollplex.schedule.registry import HYBRID_SCHEDULES, POOL_SCHEDULES, SCHEDULES, schedule_named
from rollplex.schedule.spec import PER_STEP, PREFIXES, Phase, PrefixMode, StepSpec
from rollplex.schedule.spec_from_config import graph_crosses_lanes, prefix_mode, steps_of_rollout
from rollplex.schedule.step import Limits, Schedule, run_step
from rollplex.tasks.rewards import TrainerState
from rollplex.trace import Span
from rollplex.train.advantage import has_spread, reward_metrics
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PackUse
from rollplex.train.reference import Reference
from rollplex.train.update import Updater
from rollplex.types import ScoredGroup

logger = logging.getLogger(__name__)

NextSlots = Callable[[int], list[Slot]]
"""Number of prompts -> that many new slots."""

_PASSES = [p for p in Phase if p not in (Phase.PREFILL, Phase.DECODE, Phase.REWARD, *PER_STEP)]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step's metrics, what was sampled in it, and what ran when."""

    metrics: dict[str, float]
    groups: tuple[ScoredGroup, ...]
    texts: tuple[tuple[str, ...], ...]  # decoded completions, per group
    spans: tuple[Span, ...]
    ledger: Ledger | None = None  # planned against measured bytes, of steps that were counted


def check_schedule(config: Config) -> None:
    """Raises ConfigError when the schedule that `config` names does not exist, or cannot run its steps."""
    name = config.schedule.name
    if name in HYBRID_SCHEDULES | POOL_SCHEDULES | {"async": ""}:
        raise ConfigError(
            f"schedule.name {name!r} needs devices of two kinds, which only virtual time has (rollplex simulate "
            f"--schedule {name}); here it is one of {', '.join(SCHEDULES)}, or 'module:Name'"
        )
    if name not in SCHEDULES and ":" not in name:
        raise ConfigError(f"schedule.name {name!r} is unknown; needed one of {', '.join(SCHEDULES)}, or 'module:Name'")
    schedule = schedule_named(name)
    minibatches = [1] * config.algorithm.steps_per_generation
    for spec in steps_of_rollout(config, prefill_is_actor_prefix=False, minibatches=minibatches):
        schedule.check(spec, Limits())


class Learner:
    """Owns the policy's rollout and update; `step` is one rollout and its optimizer steps."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        reference: Reference | None,
        collector: Collector,
        config: Config,
        *,
        stop_token_ids: Sequence[int],
        engines: Engines | None = None,
        memory: RunMemory | None = None,
        team: Team = ALONE,
    ):
        """engines: absent, the local engine on the policy's own weights; not closed here. memory: absent, that of
        `config`, with a reference that stays where it is. team: the processes whose learners take each step together;
        `step` of each gets all prompts and works on its replica's."""
        self.policy, self.optimizer, self.collector, self.config, self.team = policy, optimizer, collector, config, team
        self.updater = Updater(policy, optimizer, reference, config, data=team.data)
        self.params = SamplingParams.from_config(
            config, stop_token_ids=stop_token_ids, banned_token_ids=policy.adapter.vision_token_ids
        )
        self.states = ResidencyStates()
        self.memory = memory or run_memory(config, policy)
        if not self.memory.cache_vision:
            for held in self._policies:
                held.vision_cache.limit_bytes = 0
        self.schedule: Schedule = schedule_named(config.schedule.name)
        self.lanes: DeviceLanes = device_lanes(
            policy.device,
            decode_threads=config.schedule.decode_threads,
            window_threads=config.schedule.window_threads,
            window_sms=config.schedule.window_sms,
        )
        if config.schedule.window_sms is not None and graph_crosses_lanes(config):
            raise ConfigError(
                "schedule.window_sms needs train.prefix_activations=recompute with this schedule and engine, found "
                f"{config.train.prefix_activations}: a prompt's graph would be kept from one part of the GPU to "
                "another, and its backward runs where its forward did"
            )
        self.engines: Engines = engines or local_engines(config, policy)
        if config.schedule.overlap == "on" and not self.lanes.can_overlap:
            raise ConfigError(
                "schedule.overlap is on, but decoding takes every CPU thread of this run; raise run.num_threads, lower "
                "schedule.decode_threads, or set overlap to auto"
            )
        self.overlap = OverlapControl(config.schedule.overlap, self._why_closed())
        if self.overlap.reason_closed is not None and config.schedule.overlap == "auto":
            if config.schedule.name != "serial":  # who chose that knows
                logger.info("nothing runs beside decoding: %s", self.overlap.reason_closed)
        self.window = WindowThread()
        if self.overlap.reason_closed is not None and config.schedule.overlap == "on":
            logger.warning(
                "schedule.overlap is on, but nothing can run beside decoding: %s", self.overlap.reason_closed
            )

    def close(self) -> None:
        """End the window's thread."""
        self.window.close()

    def step(self, next_slots: NextSlots, state: TrainerState) -> StepOutcome:
        """One rollout and its optimizer steps. On an error no half-applied gradient is left. The calling thread has as
        many CPU threads afterwards as before. Raises StateError where a pass of a failed step still runs."""
        self.window.check_free()
        watch = Stopwatch(state.global_step + 1)
        if watch.step in self.config.run.memory_steps:
            watch.allocations = AllocationCounter(self.policy.device, self._held_bytes, to_epoch_s=watch.to_epoch_s)
        with watch.counting(), prompt_switches(), kept_threads():
            outcome, sample = self._step(next_slots, state, watch)
        if watch.allocations is None or not outcome.groups:
            return outcome
        counted = Counted(
            groups=[scored.group for scored in outcome.groups],
            spans=outcome.spans,
            trace=watch.allocations.trace(),
            overlapped=sample is not None and sample.open,
            cached_vision_bytes=sum({id(c): c.num_bytes for c in (p.vision_cache for p in self._policies)}.values()),
        )
        ledger = step_ledger(self.config, self.memory, counted)
        return replace(outcome, metrics=outcome.metrics | ledger.metrics(), ledger=ledger)

    def _step(
        self, next_slots: NextSlots, state: TrainerState, watch: Stopwatch
    ) -> tuple[StepOutcome, StepSample | None]:
        encoded = self._encode_calls()
        try:
            if self.config.algorithm.dynamic_sampling == "resample":
                tasks, extra = self._resampled(next_slots, state, watch)
            else:
                with watch.phase("prompts"):
                    slots = next_slots(self.config.rollout.prompts_per_step)
                tasks, extra = self._tasks(slots, state, watch), {}
            if tasks is None:  # nothing to learn from, by dynamic_sampling_exhausted=skip
                metrics = extra | {"step_time": watch.total()} | watch.metrics()
                return StepOutcome(metrics, (), (), tuple(watch.spans)), None
            sample = self._run(tasks, watch)
        except BaseException:
            self.optimizer.drop_gradients()
            raise
        if message := self.overlap.record(sample):
            logger.info("step %d: %s", state.global_step + 1, message)
        judged = tasks.everyone()
        advantages = advantages_of(judged, self.config.algorithm)
        raw = [item.raw for item in judged]
        groups = [item.group for item in raw]
        repeated, unique = token_counts(groups)
        metrics = {
            **reward_metrics([i.scores.rewards for i in raw], [i.scores.parts for i in raw], advantages),
            **completion_metrics(groups),
            **tasks.update_metrics(),
            **merged_log_metrics(raw),
            **extra,
            "num_tokens": float(repeated),
            "prefix/unique_tokens_ratio": unique / repeated,
            "vision/encode_calls": float(
                sum(self.team.of_replicas([self._encode_calls() - encoded], "prompts encoded"))
            ),
            **self.overlap.metrics(sample),
            **self.engines.metrics(),
            "step_time": watch.total(),
            **watch.metrics(),
        }
        texts = tuple(item.texts for item in raw)
        return StepOutcome(metrics, tuple(scored(judged, advantages)), texts, tuple(watch.spans)), sample

    def _run(self, tasks: StepTasks, watch: Stopwatch) -> StepSample:
        """All optimizer steps of one rollout, driven by the schedule."""
        is_open = self.overlap.window_open
        limits = Limits(window=1 if is_open else 0)
        decode_s = hidden_s = 0.0
        sizes = [sum(unit.minibatch == n for unit in tasks.units) for n in range(self._minibatches)]
        for spec in self._specs(sizes, rollout=not tasks.raw):
            tasks.begin(spec)
            executor = self._executor(tasks, watch)
            run_step(self.schedule, executor, spec, limits)
            decode_s += executor.decode_s
            hidden_s += executor.hidden_s
        tokens = sum(len(r.token_ids) for item in tasks.raw.values() for r in item.group.responses)
        exposed_s = sum(watch.seconds.get(name, 0.0) for name in (*_PASSES, "window"))
        return StepSample(is_open, tokens, decode_s, exposed_s, hidden_s)

    def _resampled(
        self, next_slots: NextSlots, state: TrainerState, watch: Stopwatch
    ) -> tuple[StepTasks | None, dict[str, float]]:
        """Groups to learn from, complete and scored: those of equal rewards are replaced, for a bounded number of
        rounds. Rounds run without passes beside decoding: which groups stay is not known yet."""
        algorithm, wanted = self.config.algorithm, self.config.rollout.prompts_per_step
        kept: list[tuple[RawGroup, Slot, PackUse | None]] = []
        spare: list[tuple[RawGroup, Slot, PackUse | None]] = []
        sampled = rounds = 0
        while True:
            with watch.phase("prompts"):
                slots = next_slots(wanted - len(kept))
            fresh = self._sample(slots, state, watch)
            sampled += len(fresh)
            kept += [item for item in fresh if has_spread(item[0].scores.rewards)]
            spare += [item for item in fresh if not has_spread(item[0].scores.rewards)]
            for _, _, use in spare[wanted - len(kept) :]:  # the prefixes of groups that nobody will train on
                if use is not None:
                    use.pack.release()
            spare = spare[: wanted - len(kept)]
            if len(kept) == wanted or rounds == algorithm.dynamic_sampling_max_rounds:
                break
            rounds += 1
        extra = {"dynamic_sampling/accept_rate": len(kept) / sampled, "dynamic_sampling/rounds": float(rounds)}
        chosen = self._exhausted(kept, spare, wanted)
        if not chosen:
            for _, _, use in kept:
                if use is not None:
                    use.pack.release()
            return None, extra
        tasks = self._tasks([slot for _, slot, _ in chosen], state, watch, one_each=True)
        for raw, _, use in chosen:
            tasks.adopt(raw, use)
        return tasks, extra

    def _sample(
        self, slots: Sequence[Slot], state: TrainerState, watch: Stopwatch
    ) -> list[tuple[RawGroup, Slot, PackUse | None]]:
        """One round: a rollout of one-prompt units, since a dropped prompt must not hold up the memory of others."""
        units = [Unit((slot,), 0) for slot in slots]
        tasks = self._new_tasks(units, slots, state, watch)
        executor = self._executor(tasks, watch)
        executor.run_rollout(len(units))
        return [(tasks.raw[slot.rollout_id], slot, tasks.actor_prefix_of(number)) for number, slot in enumerate(slots)]

    def _exhausted(
        self,
        kept: list[tuple[RawGroup, Slot, PackUse | None]],
        spare: list[tuple[RawGroup, Slot, PackUse | None]],
        wanted: int,
    ) -> list[tuple[RawGroup, Slot, PackUse | None]]:
        if len(kept) == wanted:
            return kept
        policy = self.config.algorithm.dynamic_sampling_exhausted
        if policy == "stop":
            raise SamplingExhausted(
                f"only {len(kept)} of {wanted} groups have differing rewards after "
                f"{self.config.algorithm.dynamic_sampling_max_rounds} more rounds; raise "
                "algorithm.dynamic_sampling_max_rounds, make the task easier or harder, or set "
                "algorithm.dynamic_sampling_exhausted to train or skip"
            )
        return [] if policy == "skip" else kept + spare

    def _tasks(
        self, slots: Sequence[Slot], state: TrainerState, watch: Stopwatch, *, one_each: bool = False
    ) -> StepTasks:
        """The work of one rollout over `slots`; one_each: a unit per prompt, as resampling needs them."""
        mode = prefix_mode(self.config)
        units = cut_units(
            share_of(slots, self.team, minibatches=self._minibatches),
            minibatches=self._minibatches,
            budget_tokens=1
            if one_each
            else min(self.config.schedule.unit_tokens, self.config.train.micro_batch_tokens),
            copies=self.config.rollout.num_generations if mode is PrefixMode.PER_RESPONSE else 1,
        )
        return self._new_tasks(units, slots, state, watch)

    def _new_tasks(
        self, units: Sequence[Unit], slots: Sequence[Slot], state: TrainerState, watch: Stopwatch
    ) -> StepTasks:
        return StepTasks(
            policy=self.policy,
            updater=self.updater,
            collector=self.collector,
            engines=self.engines,
            params=self.params,
            config=self.config,
            states=self.states,
            memory=self.memory,
            units=units,
            slots=slots,
            team=self.team,
            state=state,
            watch=watch,
        )

    def _executor(self, tasks: StepTasks, watch: Stopwatch) -> InProcessExecutor:
        timeout_s = self.config.schedule.pass_timeout_s
        return InProcessExecutor(
            tasks, self.lanes, self.window, watch, pass_timeout_s=timeout_s, counting=watch.counting
        )

    def _specs(self, sizes: Sequence[int], *, rollout: bool = True) -> tuple[StepSpec, ...]:
        """The optimizer steps of one rollout whose minibatches have `sizes` units; rollout off: it has been sampled."""
        return steps_of_rollout(
            self.config,
            prefill_is_actor_prefix=self.config.train.share_prefix and rollout and self.engines.reads_prefixes,
            minibatches=sizes,
            sampled=not rollout,
        )

    @property
    def _minibatches(self) -> int:
        return self.config.algorithm.steps_per_generation

    def _why_closed(self) -> str | None:
        """Why no pass can run beside decoding, whatever it would gain; None: some can."""
        if self.team.size > 1:
            return f"{self.team.size} processes must make their sums in one order (schedule.overlap)"
        if not self.lanes.can_overlap:
            return "decoding leaves the window no CPU thread (run.num_threads, schedule.decode_threads)"
        if self.config.algorithm.dynamic_sampling == "resample":
            return "which groups are trained on is known after the last round only (algorithm.dynamic_sampling)"
        first = self._specs([1] * self._minibatches)[0]
        if self.schedule.name == "serial":
            return "schedule.name is serial"
        if self.schedule.name == "rollplex" and not any(task.phase in PREFIXES for task in first.tasks):
            if prefix_mode(self.config) is PrefixMode.WHOLE:
                return "whole sequences have no prefix pass to move (train.share_prefix)"
            return "there is no prefix pass to move: no reference, and the engine decodes on the update's own prefixes"
        return None

    @property
    def _policies(self) -> list[Policy]:
        reference = self.updater.reference
        return [self.policy] if reference is None else [self.policy, reference.policy]

    def _held_bytes(self) -> int:
        """What is allocated between steps; a CPU's allocator does not say, so that what should be is added up."""
        device = self.policy.device
        allocated = allocated_bytes(device)
        return held_bytes(self._lasting_tensors(), device) if allocated is None else allocated

    def _lasting_tensors(self) -> Iterator[torch.Tensor]:
        """What stays from step to step."""
        for policy in self._policies:
            yield from (*policy.model.parameters(), *policy.model.buffers(), *policy.adapter.kept_tensors())
            for features in policy.vision_cache.entries.values():
                yield from (features.embeds, *features.deepstack)
        yield from self.optimizer.device_state()

    def _encode_calls(self) -> int:
        """Prompts that went through the vision tower so far, the policy's and the reference's."""
        reference = self.updater.reference
        return self.policy.encode_calls + (0 if reference is None else reference.policy.encode_calls)
