"""From scored groups to new weights: scoring passes, two-stage backward, optimizer steps.

One optimizer step is
    for each pack of prompts:  for each micro-batch of its responses: response forward, loss, backward  (`respond`)
                               one prefix backward                                                 (`push_prefix`)
    clip, AdamW, weight version + 1                                                                     (`apply`)
Losses are sums with normalisers known beforehand (or one common factor that `apply` takes): any partition into packs
and micro-batches gives the same gradient. `Updater.update` is the whole in order; a schedule calls the parts.
With several optimizer steps per rollout, log-probs of the sampling weights are taken for all of them before the first,
and every later step computes its prefixes again (the old ones are stale; using one raises).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rollplex.config import Config
from rollplex.models.logprobs import TokenLogps
from rollplex.models.policy import Policy
from rollplex.models.prefix import Activations, backward_prefix
from rollplex.parallel.waits import Peers
from rollplex.train.correction import MismatchStats, merge_stats, mismatch_correction
from rollplex.train.data_parallel import totals_over_ranks
from rollplex.train.full_sequence import full_sequence_logps
from rollplex.train.loss import LossBatch, LossResult, LossSettings, LossTotals, policy_loss
from rollplex.train.metric_sums import MetricSums, merge_metrics
from rollplex.train.microbatch import Item, items_of, minibatches, pack_by_tokens, pack_padded
from rollplex.train.optimizer import OptimizerStep, PolicyOptimizer
from rollplex.train.prefix_book import PackUse, PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.response import GroupTokens, response_logps
from rollplex.types import Group, ScoredGroup

Logps = Mapping[int, tuple[torch.Tensor, ...]]
"""Rollout id -> log-probs of each of its responses."""

PassResult = tuple[MetricSums, MismatchStats]
"""What one micro-batch of responses was measured at."""


@dataclass(frozen=True, slots=True)
class FrozenLogps:
    """Log-probs under weights that do not move during the update; None: not needed."""

    old: Logps | None  # under the weights that sampled
    ref: Logps | None  # of the reference


class Updater:
    """Turns the groups of one rollout into optimizer steps on the policy."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        reference: Reference | None,
        config: Config,
        *,
        data: Peers | None = None,
    ):
        """data: replicas that learn from the other groups of each step; None: all groups are here."""
        self.policy, self.optimizer, self.reference, self._data = policy, optimizer, reference, data
        self.algorithm, self.train = config.algorithm, config.train
        self.correction = config.mismatch_correction
        self.temperature = config.rollout.temperature
        self.settings = LossSettings.from_config(config.algorithm, config.rollout.max_completion_length)

    @property
    def needs_old(self) -> bool:
        """Whether log-probs of the sampling weights must be taken beforehand; else the training pass's own serve."""
        several = self.algorithm.num_iterations * self.algorithm.steps_per_generation > 1
        return several or self.algorithm.kl_in_reward

    def frozen_logps(self, groups: Sequence[Group], book: PrefixBook | None) -> FrozenLogps:
        """Log-probs that the advantages or the losses need, before any weight moves."""
        old = self.old_logps(groups, book) if self.needs_old else None
        return FrozenLogps(old, self.reference_logps(groups) if self.reference is not None else None)

    def old_logps(self, groups: Sequence[Group], book: PrefixBook | None) -> Logps:
        """Log-probs under the policy's present weights, on the rollout's own prefixes."""
        uses = None if book is None else book.uses([group.rollout_id for group in groups])
        return self.score(self.policy, groups, uses)

    def reference_logps(self, groups: Sequence[Group]) -> Logps:
        """Log-probs under the reference; its prefixes are computed once per prompt and then released."""
        assert self.reference is not None  # the caller asked
        policy, budget = self.reference.policy, self.train.micro_batch_tokens
        uses = _fresh_uses(policy, groups, budget, "none") if self.train.share_prefix else None
        return self.score(policy, groups, uses)

    def score(self, policy: Policy, groups: Sequence[Group], uses: Iterable[PackUse] | None) -> Logps:
        """Log-probs of all responses under `policy`, without gradient; `uses` None: by the full-sequence path."""
        return _score(policy, groups, uses, self.temperature, self.train.micro_batch_tokens)

    def update(self, groups: Sequence[ScoredGroup], book: PrefixBook | None, frozen: FrozenLogps) -> dict[str, float]:
        """All optimizer steps of one rollout; metrics of their union. Gradients never outlive an error."""
        parts: list[MetricSums] = []
        stats: list[MismatchStats] = []
        done: list[OptimizerStep] = []
        items = items_of(groups, mask_truncated=self.algorithm.mask_truncated_completions)
        rollout_tokens = sum(len(item.tokens) for item in items if item.counts)
        steps = minibatches(groups, self.algorithm.steps_per_generation)
        try:
            for epoch in range(self.algorithm.num_iterations):
                for minibatch in steps:
                    totals = self.totals(minibatch, rollout_tokens=rollout_tokens, num_minibatches=len(steps))
                    got = self._accumulate(minibatch, book, frozen, totals)
                    parts += [metrics for metrics, _ in got]
                    stats += [stat for _, stat in got] if epoch == 0 else []
                    done.append(self.apply(minibatch))
        except BaseException:
            self.optimizer.drop_gradients()
            raise
        return update_metrics(parts, stats, done)

    def totals(
        self, groups: Sequence[ScoredGroup], *, rollout_tokens: int | None = None, num_minibatches: int = 1
    ) -> LossTotals:
        """Sizes of the optimizer step over `groups`, and those of all replicas, who must call it together.

        rollout_tokens: counted tokens of the whole rollout (of this replica's part of it).
        """
        items = items_of(groups, mask_truncated=self.algorithm.mask_truncated_completions)
        if self._data is not None:
            return totals_over_ranks(
                self._data, items, rollout_tokens=rollout_tokens, steps_per_generation=num_minibatches
            )
        return LossTotals.of_step(
            [len(item.tokens) for item in items],
            [item.counts for item in items],
            rollout_tokens=rollout_tokens,
            steps_per_generation=num_minibatches,
        )

    def respond(
        self, use: PackUse | None, groups: Sequence[ScoredGroup], frozen: FrozenLogps, totals: LossTotals
    ) -> list[PassResult]:
        """All response passes of `groups`, forward and backward: gradients are left in the parameters and, with a pack,
        in its boundary accumulators. `use` None: whole sequences.

        Groups that cannot move the weights (all advantages 0, no KL in the loss) only run forward, for the metrics.
        """
        results = []
        masked = self.algorithm.mask_truncated_completions
        if use is None:
            items = items_of(groups, mask_truncated=masked)
            sizes = [item.scored.group.spec.num_tokens + len(item.tokens) for item in items]
            for picked in pack_padded(sizes, self.train.micro_batch_tokens):
                results.append(self._micro_batch(None, [items[i] for i in picked], frozen, totals))
            return results
        for part in ([g for g in groups if self._teaches(g)], [g for g in groups if not self._teaches(g)]):
            items = items_of(part, mask_truncated=masked)
            for picked in pack_by_tokens([len(item.tokens) for item in items], self.train.micro_batch_tokens):
                results.append(self._micro_batch(use, [items[i] for i in picked], frozen, totals))
        return results

    def push_prefix(self, use: PackUse, groups: Sequence[ScoredGroup]) -> None:
        """The one prefix backward of a pack, after the response passes of all its `groups`; then it is released."""
        if any(self._teaches(group) for group in groups):
            backward_prefix(use.pack)
        else:
            use.pack.release()

    def apply(self, groups: Sequence[ScoredGroup], *, scale: float = 1.0) -> OptimizerStep:
        """Clip, AdamW, weight version + 1, on the gradients of `groups` times `scale`: the common factor of a loss that
        was summed without its normalisation (`LossTotals.deferred`)."""
        self.optimizer.fill_gradients(self._reached_by(groups))
        if scale != 1.0:
            self.optimizer.scale_gradients(scale)
        step = self.optimizer.step()
        self.policy.bump()
        return step

    def _reached_by(self, groups: Sequence[ScoredGroup]) -> list[torch.Tensor]:
        """Weights that an ordinary pass over `groups` would give a gradient, be it 0.

        Groups that teach nothing get no backward pass, yet AdamW must move the weights that only they reach as it does
        for a gradient of 0: moments decay, weight decay applies.
        """
        media = any((group.group.spec.token_types > 0).any() for group in groups)
        visual = {id(p) for p in self.policy.adapter.visual.parameters()}
        return [p for p in self.optimizer.weights.values() if media or id(p) not in visual]

    def _accumulate(
        self, groups: Sequence[ScoredGroup], book: PrefixBook | None, frozen: FrozenLogps, totals: LossTotals
    ) -> list[PassResult]:
        """Forward and backward of one optimizer step, gradients left in the parameters."""
        if not self.train.share_prefix:
            return self.respond(None, groups, frozen, totals)
        results: list[PassResult] = []
        by_id = {scored.group.rollout_id: scored for scored in groups}
        for use in self._uses(groups, book):
            members = [by_id[rollout_id] for rollout_id in use.numbers]
            results += self.respond(use, members, frozen, totals)
            self.push_prefix(use, members)
        return results

    def _uses(self, groups: Sequence[ScoredGroup], book: PrefixBook | None) -> Iterator[PackUse]:
        """The rollout's own packs where they can still be trained on, else packs computed when their turn comes."""
        ready = [g for g in groups if book is not None and book.trainable(g.group.rollout_id)]
        if book is not None and ready:
            yield from book.uses([g.group.rollout_id for g in ready])
        done = {g.group.rollout_id for g in ready}
        yield from _fresh_uses(
            self.policy,
            [g.group for g in groups if g.group.rollout_id not in done],
            self.train.micro_batch_tokens,
            self.train.prefix_activations,
        )

    def _teaches(self, scored: ScoredGroup) -> bool:
        return self.settings.beta != 0.0 or any(advantage != 0.0 for advantage in scored.advantages)

    def _micro_batch(
        self, use: PackUse | None, items: Sequence[Item], frozen: FrozenLogps, totals: LossTotals
    ) -> PassResult:
        with_grad = any(self._teaches(item.scored) for item in items)
        logps = _item_logps(self.policy, use, items, self.temperature, with_grad=with_grad)
        result, stats = self._loss(logps, items, frozen, totals)
        if with_grad:
            result.loss.backward()
        return result.metrics, stats

    def _loss(
        self, logps: TokenLogps, items: Sequence[Item], frozen: FrozenLogps, totals: LossTotals
    ) -> tuple[LossResult, MismatchStats]:
        device, dtype = logps.logps.device, logps.logps.dtype
        lengths = torch.tensor([len(item.tokens) for item in items], device=device)
        row_T = torch.repeat_interleave(torch.arange(len(items), device=device), lengths)
        counts_N = torch.tensor([item.counts for item in items], device=device)
        old_T = _gather(frozen.old, items)
        sampled = [logp for item in items for logp in item.scored.group.responses[item.index].logps]
        correction = mismatch_correction(
            logps.logps.detach() if old_T is None else old_T,
            torch.tensor(sampled, dtype=dtype, device=device),
            row_T,
            counts_N,
            mode=self.correction,
            clip_max=self.algorithm.mismatch_clip_max,
        )
        batch = LossBatch(
            logp_T=logps.logps,
            old_logp_T=old_T,
            ref_logp_T=_gather(frozen.ref, items),
            advantage_N=torch.tensor([item.advantage for item in items], dtype=dtype, device=device),
            row_T=row_T,
            counts_N=counts_N,
            weight_T=correction.weight_T,
            entropy_T=logps.entropies,
        )
        return policy_loss(batch, totals, self.settings), correction.stats


def update_metrics(
    parts: Sequence[MetricSums],
    stats: Sequence[MismatchStats],
    steps: Sequence[OptimizerStep],
    *,
    loss_scale: float = 1.0,
) -> dict[str, float]:
    """Metrics of a rollout's optimizer steps together. parts: of all their micro-batches; stats: of the first epoch's;
    loss_scale: what the gradients were multiplied by at the end."""
    metrics = merge_metrics(parts).values() | merge_stats(stats).metrics()
    for name in ("loss", "policy_loss"):  # sums over optimizer steps: report their mean
        metrics[name] = metrics.get(name, 0.0) * loss_scale / len(steps)
    norms = [step.grad_norm for step in steps]
    return metrics | {"grad_norm": sum(norms) / len(norms), "learning_rate": steps[-1].learning_rate}


def _item_logps(
    policy: Policy, use: PackUse | None, items: Sequence[Item], temperature: float, *, with_grad: bool
) -> TokenLogps:
    """Log-probs of `items` in order, on a pack's prefixes or by the full-sequence path."""
    if use is None:
        rows = [(item.scored.group.spec, item.tokens) for item in items]
        return full_sequence_logps(policy, rows, temperature, with_grad=with_grad)
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for item in items:
        grouped.setdefault(use.number(item.scored.group.rollout_id, item.index), []).append(item.tokens)
    tokens = [GroupTokens(number, tuple(part)) for number, part in grouped.items()]
    return response_logps(use.pack, tokens, temperature, with_grad=with_grad)


def _fresh_uses(
    policy: Policy, groups: Sequence[Group], budget_tokens: int, activations: Activations
) -> Iterator[PackUse]:
    """Packs of `groups`' prompts, each computed when it is asked for."""
    for picked in pack_by_tokens([group.spec.num_tokens for group in groups], budget_tokens):
        book = PrefixBook(policy, budget_tokens)
        book.compute({groups[i].rollout_id: groups[i].spec for i in picked}, activations)
        yield from book.uses([groups[i].rollout_id for i in picked])


def _score(
    policy: Policy, groups: Sequence[Group], uses: Iterable[PackUse] | None, temperature: float, budget_tokens: int
) -> Logps:
    """Log-probs of all responses without gradient; `uses` None: by the full-sequence path."""
    by_id = {group.rollout_id: group for group in groups}
    work: Iterable[tuple[PackUse | None, list[Group]]]
    if uses is None:
        work = [(None, list(groups))]
    else:
        work = ((use, [by_id[rollout_id] for rollout_id in use.numbers]) for use in uses)
    logps: dict[int, tuple[torch.Tensor, ...]] = {}
    for use, members in work:
        scored = [ScoredGroup(g, (), {}, (0.0,) * len(g.responses)) for g in members]
        items = items_of(scored, mask_truncated=False)
        if use is not None:
            picks = pack_by_tokens([len(item.tokens) for item in items], budget_tokens)
        else:  # the full-sequence path carries each prompt along, and pads
            picks = pack_padded([item.scored.group.spec.num_tokens + len(item.tokens) for item in items], budget_tokens)
        parts: dict[int, list[torch.Tensor]] = {group.rollout_id: [] for group in members}
        for picked in picks:
            chosen = [items[i] for i in picked]
            got = _item_logps(policy, use, chosen, temperature, with_grad=False)
            for item, part in zip(chosen, got.logps.split([len(i.tokens) for i in chosen]), strict=True):
                parts[item.scored.group.rollout_id].append(part)
        logps.update({rollout_id: tuple(part) for rollout_id, part in parts.items()})
    return logps


def _gather(logps: Logps | None, items: Sequence[Item]) -> torch.Tensor | None:
    """Packed log-probs of `items`."""
    if logps is None:
        return None
    return torch.cat([logps[item.scored.group.rollout_id][item.index] for item in items])
