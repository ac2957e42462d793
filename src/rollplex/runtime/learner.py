"""One on-policy step in one process: prompts -> prefixes -> rollout -> rewards -> advantages -> new weights.

With `share_prefix` the prompt pass happens once: the same pack serves decoding, scoring and, for the first optimizer
step, the update. Nothing in here knows where prompts come from or where results are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollplex.config import Config
from rollplex.errors import SamplingExhausted
from rollplex.models.policy import Policy
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.runtime.collect import Collector, RawGroup, Slot, merged_log_metrics
from rollplex.runtime.step_metrics import completion_metrics, token_counts
from rollplex.runtime.stopwatch import Stopwatch
from rollplex.tasks.rewards import PendingScores, TrainerState
from rollplex.trace import Span
from rollplex.train.advantage import Advantages, compute_advantages, estimator_of, has_spread, reward_metrics
from rollplex.train.kl import response_kl
from rollplex.train.microbatch import counts_in_loss
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.update import FrozenLogps, Updater
from rollplex.types import Group, ScoredGroup

NextSlots = Callable[[int], list[Slot]]
"""Number of prompts -> that many new slots."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step's metrics, what was sampled in it, and what ran when."""

    metrics: dict[str, float]
    groups: tuple[ScoredGroup, ...]
    texts: tuple[tuple[str, ...], ...]  # decoded completions, per group
    spans: tuple[Span, ...]


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
    ):
        self.policy, self.optimizer, self.collector, self.config = policy, optimizer, collector, config
        self.updater = Updater(policy, optimizer, reference, config)
        self.params = SamplingParams.from_config(
            config, stop_token_ids=stop_token_ids, banned_token_ids=policy.adapter.vision_token_ids
        )

    def step(self, next_slots: NextSlots, state: TrainerState) -> StepOutcome:
        """One rollout and its optimizer steps. On an error no half-applied gradient is left."""
        watch = Stopwatch(state.global_step + 1)
        encoded = self._encode_calls()
        try:
            raw, book, extra = self._rollout(next_slots, state, watch)
            if not raw:  # nothing to learn from, by dynamic_sampling_exhausted=skip
                return StepOutcome(extra | {"step_time": watch.total()} | watch.metrics(), (), (), tuple(watch.spans))
            groups = [item.group for item in raw]
            with watch.phase("score"):
                frozen = self.updater.frozen_logps(groups, book)
            advantages = self._advantages(raw, frozen)
            scored = [
                ScoredGroup(item.group, item.scores.rewards, item.scores.parts, values, item.scores.extras)
                for item, values in zip(raw, advantages.values, strict=True)
            ]
            with watch.phase("update"):
                updated = self.updater.update(scored, book, frozen)
        except BaseException:
            self.optimizer.drop_gradients()
            raise
        repeated, unique = token_counts(groups)
        metrics = {
            **reward_metrics([i.scores.rewards for i in raw], [i.scores.parts for i in raw], advantages),
            **completion_metrics(groups),
            **updated,
            **merged_log_metrics(raw),
            **extra,
            "num_tokens": float(repeated),
            "prefix/unique_tokens_ratio": unique / repeated,
            "vision/encode_calls": float(self._encode_calls() - encoded),
            "step_time": watch.total(),
            **watch.metrics(),
        }
        return StepOutcome(metrics, tuple(scored), tuple(item.texts for item in raw), tuple(watch.spans))

    def _rollout(
        self, next_slots: NextSlots, state: TrainerState, watch: Stopwatch
    ) -> tuple[list[RawGroup], PrefixBook | None, dict[str, float]]:
        """Groups to learn from. With dynamic sampling, groups of equal rewards are replaced, for a bounded number of
        rounds."""
        wanted = self.config.rollout.prompts_per_step
        dynamic = self.config.algorithm.dynamic_sampling == "resample"
        budget = 1 if dynamic else self.config.train.micro_batch_tokens  # a dropped prompt must not hold up a pack
        book = PrefixBook(self.policy, budget) if self.config.train.share_prefix else None
        fresh = self._sample(next_slots, wanted, book, state, watch)
        if not dynamic:
            return fresh, book, {}
        kept: list[RawGroup] = []
        spare: list[RawGroup] = []
        sampled = rounds = 0
        while True:
            sampled += len(fresh)
            kept += [item for item in fresh if has_spread(item.scores.rewards)]
            spare = [*spare, *(item for item in fresh if not has_spread(item.scores.rewards))][: wanted - len(kept)]
            if book is not None:  # the prefixes of groups that nobody will train on
                book.keep({item.group.rollout_id for item in (*kept, *spare)})
            if len(kept) == wanted or rounds == self.config.algorithm.dynamic_sampling_max_rounds:
                break
            rounds += 1
            fresh = self._sample(next_slots, wanted - len(kept), book, state, watch)
        extra = {"dynamic_sampling/accept_rate": len(kept) / sampled, "dynamic_sampling/rounds": float(rounds)}
        return self._exhausted(kept, spare, wanted), book, extra

    def _exhausted(self, kept: list[RawGroup], spare: list[RawGroup], wanted: int) -> list[RawGroup]:
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

    def _encode_calls(self) -> int:
        """Prompts that went through the vision tower so far, the policy's and the reference's."""
        reference = self.updater.reference
        return self.policy.encode_calls + (0 if reference is None else reference.policy.encode_calls)

    def _sample(
        self, next_slots: NextSlots, count: int, book: PrefixBook | None, state: TrainerState, watch: Stopwatch
    ) -> list[RawGroup]:
        with watch.phase("prompts"):
            slots = next_slots(count)
        if book is not None:
            with watch.phase("prefix"):
                self._compute_prefixes(slots, book)
        engine = LocalEngine(
            self.policy,
            self.params,
            max_rows=self.config.rollout.max_decode_rows,
            prefix_source=None if book is None else book.source,
        )
        with watch.phase("decode", traced=False) as decode_began_s:
            pending = self.collector.decode(
                engine, slots, self.params.num_generations, self.policy.weight_version, state
            )
        with watch.phase("reward", traced=False):
            raw = self.collector.scored(pending)
        _trace_groups(watch, decode_began_s, pending, raw)
        return raw

    def _compute_prefixes(self, slots: Sequence[Slot], book: PrefixBook) -> None:
        """Prefixes of the first optimizer step are kept for its backward; later steps' would be stale by then."""
        steps = self.config.algorithm.steps_per_generation
        first = len(slots) if steps == 1 else len(slots) // steps
        book.compute({slot.rollout_id: slot.spec for slot in slots[:first]}, self.config.train.prefix_activations)
        if first < len(slots):
            book.compute({slot.rollout_id: slot.spec for slot in slots[first:]}, "none")

    def _advantages(self, raw: Sequence[RawGroup], frozen: FrozenLogps) -> Advantages:
        algorithm = self.config.algorithm
        kl = None
        if algorithm.kl_in_reward and frozen.old is not None and frozen.ref is not None:
            ids = [item.group.rollout_id for item in raw]
            kl = [response_kl(frozen.old[i], frozen.ref[i], algorithm.kl_estimator) for i in ids]
        masked = algorithm.mask_truncated_completions
        lengths = [
            [len(r.token_ids) if counts_in_loss(r, mask_truncated=masked) else 0 for r in item.group.responses]
            for item in raw
        ]
        return compute_advantages(
            [item.scores.rewards for item in raw],
            estimator=estimator_of(algorithm.loss_type),
            scale_rewards=algorithm.scale_rewards,
            beta=algorithm.beta,
            kl=kl,
            lengths=lengths,
        )


def _trace_groups(
    watch: Stopwatch,
    decode_began_s: float,
    pending: Sequence[tuple[Group, tuple[str, ...], PendingScores]],
    raw: Sequence[RawGroup],
) -> None:
    """Spans of each group: decoded until its rewards were submitted, rewarded until the last function's answer."""
    for (group, _, scores), item in zip(pending, raw, strict=True):
        complete_s = scores.submitted
        watch.record("decode", "decode", decode_began_s, complete_s, group=group.rollout_id)
        watch.record("reward", "reward", complete_s, complete_s + item.scores.seconds, group=group.rollout_id)
