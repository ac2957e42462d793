"""From scored groups to new weights: scoring passes, two-stage backward, optimizer steps.

One optimizer step is
    for each pack of prompts:  for each micro-batch of its responses: response forward, loss, backward
                               one prefix backward
    clip, AdamW, weight version + 1
Losses are sums with normalisers known beforehand: any partition into packs and micro-batches gives the same gradient.
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
from rollplex.train.correction import MismatchStats, merge_stats, mismatch_correction
from rollplex.train.full_sequence import full_sequence_logps
from rollplex.train.loss import LossBatch, LossResult, LossSettings, LossTotals, policy_loss
from rollplex.train.metric_sums import MetricSums, merge_metrics
from rollplex.train.microbatch import Item, items_of, minibatches, pack_by_tokens, pack_padded
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PackUse, PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.response import GroupTokens, response_logps
from rollplex.types import Group, ScoredGroup

Logps = Mapping[int, tuple[torch.Tensor, ...]]
"""Rollout id -> log-probs of each of its responses."""


@dataclass(frozen=True, slots=True)
class FrozenLogps:
    """Log-probs under weights that do not move during the update; None: not needed."""

    old: Logps | None  # under the weights that sampled
    ref: Logps | None  # of the reference


class Updater:
    """Turns the groups of one rollout into optimizer steps on the policy."""

    def __init__(self, policy: Policy, optimizer: PolicyOptimizer, reference: Reference | None, config: Config):
        self.policy, self.optimizer, self.reference = policy, optimizer, reference
        self.algorithm, self.train = config.algorithm, config.train
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
        return _score(self.policy, groups, uses, self.temperature, self.train.micro_batch_tokens)

    def reference_logps(self, groups: Sequence[Group]) -> Logps:
        """Log-probs under the reference; its prefixes are computed once per prompt and then released."""
        assert self.reference is not None  # the caller asked
        budget = self.train.micro_batch_tokens
        with self.reference.active() as policy:
            uses = _fresh_uses(policy, groups, budget, "none") if self.train.share_prefix else None
            return _score(policy, groups, uses, self.temperature, budget)

    def update(self, groups: Sequence[ScoredGroup], book: PrefixBook | None, frozen: FrozenLogps) -> dict[str, float]:
        """All optimizer steps of one rollout; metrics of their union. Gradients never outlive an error."""
        parts: list[MetricSums] = []
        stats: list[MismatchStats] = []
        norms: list[float] = []
        items = items_of(groups, mask_truncated=self.algorithm.mask_truncated_completions)
        rollout_tokens = sum(len(item.tokens) for item in items if item.counts)
        steps = minibatches(groups, self.algorithm.steps_per_generation)
        rate = 0.0
        try:
            for epoch in range(self.algorithm.num_iterations):
                for minibatch in steps:
                    own = items_of(minibatch, mask_truncated=self.algorithm.mask_truncated_completions)
                    totals = LossTotals.of_step(
                        [len(item.tokens) for item in own],
                        [item.counts for item in own],
                        rollout_tokens=rollout_tokens,
                        steps_per_generation=len(steps),
                    )
                    got = self._accumulate(minibatch, book, frozen, totals)
                    parts.append(got[0])
                    stats += got[1] if epoch == 0 else []
                    self.optimizer.fill_gradients(self._reached_by(minibatch))
                    step = self.optimizer.step()
                    self.policy.bump()
                    norms.append(step.grad_norm)
                    rate = step.learning_rate
        except BaseException:
            self.optimizer.drop_gradients()
            raise
        metrics = merge_metrics(parts).values() | merge_stats(stats).metrics()
        for name in ("loss", "policy_loss"):  # sums over optimizer steps: report their mean
            metrics[name] = metrics.get(name, 0.0) / len(norms)
        return metrics | {"grad_norm": sum(norms) / len(norms), "learning_rate": rate}

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
    ) -> tuple[MetricSums, list[MismatchStats]]:
        """Forward and backward of one optimizer step, gradients left in the parameters."""
        results: list[tuple[MetricSums, MismatchStats]] = []
        if not self.train.share_prefix:
            items = items_of(groups, mask_truncated=self.algorithm.mask_truncated_completions)
            sizes = [item.scored.group.spec.num_tokens + len(item.tokens) for item in items]
            for picked in pack_padded(sizes, self.train.micro_batch_tokens):
                results.append(self._micro_batch(None, [items[i] for i in picked], frozen, totals))
            return merge_metrics(m for m, _ in results), [s for _, s in results]
        by_id = {scored.group.rollout_id: scored for scored in groups}
        for use in self._uses(groups, book):
            results += self._pack(use, [by_id[rollout_id] for rollout_id in use.numbers], frozen, totals)
        return merge_metrics(m for m, _ in results), [s for _, s in results]

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

    def _pack(
        self, use: PackUse, groups: Sequence[ScoredGroup], frozen: FrozenLogps, totals: LossTotals
    ) -> list[tuple[MetricSums, MismatchStats]]:
        """All responses on one pack of prefixes, then its one prefix backward.

        Groups that cannot move the weights (all advantages 0, no KL in the loss) only run forward, for the metrics.
        """
        results = []
        learning = [g for g in groups if self._teaches(g)]
        for part in (learning, [g for g in groups if not self._teaches(g)]):
            items = items_of(part, mask_truncated=self.algorithm.mask_truncated_completions)
            for picked in pack_by_tokens([len(item.tokens) for item in items], self.train.micro_batch_tokens):
                results.append(self._micro_batch(use, [items[i] for i in picked], frozen, totals))
        if learning:
            backward_prefix(use.pack)
        else:
            use.pack.release()
        return results

    def _teaches(self, scored: ScoredGroup) -> bool:
        return self.settings.beta != 0.0 or any(advantage != 0.0 for advantage in scored.advantages)

    def _micro_batch(
        self, use: PackUse | None, items: Sequence[Item], frozen: FrozenLogps, totals: LossTotals
    ) -> tuple[MetricSums, MismatchStats]:
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
            mode=self.algorithm.mismatch_correction,
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


def _item_logps(
    policy: Policy, use: PackUse | None, items: Sequence[Item], temperature: float, *, with_grad: bool
) -> TokenLogps:
    """Log-probs of `items` in order, on a pack's prefixes or by the full-sequence path."""
    if use is None:
        rows = [(item.scored.group.spec, item.tokens) for item in items]
        return full_sequence_logps(policy, rows, temperature, with_grad=with_grad)
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for item in items:
        grouped.setdefault(item.scored.group.rollout_id, []).append(item.tokens)
    tokens = [GroupTokens(use.numbers[rollout_id], tuple(part)) for rollout_id, part in grouped.items()]
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
