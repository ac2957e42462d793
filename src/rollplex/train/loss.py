"""Policy losses on packed tokens. One definition of every mask, ratio and reduction; docs/losses.md has the formulas.

A loss is a sum over tokens: loss = sum_t scale_t * mask_t * (weight_t * policy_t + beta * ratio_t * kl_t). `scale_t`
holds the whole normalisation and depends only on the token's own response and on `LossTotals` of the optimizer step.
So the losses of micro-batches, each of whole responses, add up to the loss of the step for every partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from rollplex.config_algorithm import AlgorithmConfig
from rollplex.errors import ConfigError
from rollplex.schedule.stream import SCALES, Scale
from rollplex.train.kl import KlEstimator, token_kl, unbiased
from rollplex.train.metric_sums import MetricSums

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "rloo", "reinforce_pp"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What shapes the loss. Made by `from_config`, which refuses combinations that would do nothing."""

    loss_type: LossType  # gspo arrives as grpo with level "sequence"
    epsilon_low: float
    epsilon_high: float  # cispo: the largest ratio itself; else 1 + epsilon_high is
    delta: float | None
    level: Literal["token", "sequence"]  # of the probability ratio; rloo always uses the whole response's
    beta: float  # of the KL term in the loss; 0 when the KL goes into the reward
    kl_by_ratio: bool  # the KL term is multiplied by the probability ratio
    kl_estimator: KlEstimator
    max_completion_length: int  # dr_grpo divides by it

    @classmethod
    def from_config(cls, algorithm: AlgorithmConfig, max_completion_length: int) -> LossSettings:
        """Raises ConfigError for cispo without epsilon_high and for delta where no unclipped branch exists."""
        name = algorithm.loss_type
        if name == "cispo" and algorithm.epsilon_high is None:
            raise ConfigError(
                "algorithm.loss_type=cispo needs algorithm.epsilon_high: there it is the largest importance weight "
                "itself (ScaleRL uses 5.0), and falling back to epsilon "
                f"({algorithm.epsilon}) would scale every gradient down"
            )
        if name == "cispo" and algorithm.delta is not None:
            raise ConfigError("algorithm.delta has no effect with loss_type=cispo (no unclipped branch); remove it")
        high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
        return cls(
            loss_type="grpo" if name == "gspo" else name,
            epsilon_low=algorithm.epsilon,
            epsilon_high=high,
            delta=algorithm.delta,
            level="sequence" if name == "gspo" else algorithm.importance_sampling_level,
            beta=0.0 if algorithm.kl_in_reward else algorithm.beta,
            kl_by_ratio=algorithm.kl_by_ratio,
            kl_estimator=algorithm.kl_estimator,
            max_completion_length=max_completion_length,
        )


@dataclass(frozen=True, slots=True)
class LossTotals:
    """Sizes of what one optimizer step learns from, known before its first micro-batch."""

    num_rows: int  # responses of the step, left-out ones included
    num_tokens: int  # tokens of the step's counted responses
    mean_step_tokens: float  # counted tokens of the whole rollout / optimizer steps per epoch over it

    @classmethod
    def of_step(
        cls,
        lengths: Sequence[int],
        counts: Sequence[bool],
        *,
        rollout_tokens: int | None = None,
        steps_per_generation: int = 1,
    ) -> LossTotals:
        """From the length of each response of the step and whether it counts (mask_truncated_completions).

        rollout_tokens: counted tokens of the whole rollout; absent: the step takes the whole rollout.
        """
        tokens = sum(n for n, counted in zip(lengths, counts, strict=True) if counted)
        whole = tokens if rollout_tokens is None else rollout_tokens
        return cls(len(lengths), tokens, max(whole, 1) / steps_per_generation)

    @classmethod
    def deferred(cls, num_rows: int) -> LossTotals:
        """Of a step whose tokens are not all sampled yet, the only one of its rollout: a loss that divides by tokens
        comes out undivided, and its gradient and value are to be multiplied by `deferred_scale` at the end."""
        return cls(num_rows, 1, 1.0)

    def deferred_scale(self, loss_type: LossType) -> float:
        """The factor that a loss computed with `deferred` lacks, once these totals are known."""
        return 1.0 / max(self.num_tokens, 1) if SCALES[loss_type] is Scale.AT_END else 1.0


@dataclass(frozen=True, slots=True)
class LossBatch:
    """Whole responses of one micro-batch, packed. All floats in one dtype, at least fp32."""

    logp_T: torch.Tensor  # under the weights being trained; carries the gradient
    old_logp_T: torch.Tensor | None  # under the weights that sampled; None: this pass's own, so the ratio is exactly 1
    ref_logp_T: torch.Tensor | None  # of the reference; None: no KL
    advantage_N: torch.Tensor  # per response
    row_T: torch.Tensor  # int64, response of each token
    counts_N: torch.Tensor  # bool, responses that count in the loss
    weight_T: torch.Tensor | None = None  # mismatch correction
    entropy_T: torch.Tensor | None = None  # for the metric only

    def __post_init__(self) -> None:
        tokens, rows = self.logp_T.shape, self.advantage_N.shape
        for name in ("old_logp_T", "ref_logp_T", "row_T", "weight_T", "entropy_T"):
            value = getattr(self, name)
            if value is not None and value.shape != tokens:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, needed that of logp_T, {tuple(tokens)}")
        if self.counts_N.shape != rows or len(rows) != 1 or len(tokens) != 1:
            raise ValueError(
                f"needed (T,) tokens and (N,) responses, found logp_T {tuple(tokens)}, advantage_N {tuple(rows)}, "
                f"counts_N {tuple(self.counts_N.shape)}"
            )


class LossResult(NamedTuple):
    """Loss of one micro-batch (0-d, with gradient) and its metrics."""

    loss: torch.Tensor
    metrics: MetricSums


def policy_loss(batch: LossBatch, totals: LossTotals, settings: LossSettings) -> LossResult:
    """This micro-batch's share of the optimizer step's loss. Sum the shares; divide by nothing."""
    if settings.beta != 0.0 and batch.ref_logp_T is None:
        raise ValueError("beta is not 0: needs ref_logp_T")
    mask_T = batch.counts_N[batch.row_T]
    sizes_N = _row_sum(mask_T.to(batch.logp_T.dtype), batch)
    # Left-out responses get ratio 1 and KL 0 before any exponential: an overflow would turn 0 * inf into NaN.
    old_logp_T = batch.logp_T.detach() if batch.old_logp_T is None else batch.old_logp_T
    log_ratio_T = torch.where(mask_T, batch.logp_T - old_logp_T, 0.0)
    ratio = _ratio(log_ratio_T, sizes_N, batch, settings)
    policy_T = _policy_term(ratio.per_token(batch), sizes_N, batch, settings)
    scale_T = torch.where(mask_T, _scale(sizes_N, totals, settings)[batch.row_T], 0.0)
    policy = (scale_T * torch.where(mask_T, policy_T, 0.0)).sum()
    loss = policy
    kl_T = None
    if batch.ref_logp_T is not None:
        ref_logp_T = torch.where(mask_T, batch.ref_logp_T, batch.logp_T.detach())
        kl_T = torch.where(mask_T, token_kl(batch.logp_T, ref_logp_T, settings.kl_estimator), 0.0)
        if settings.beta != 0.0:
            if settings.kl_by_ratio:
                # rloo's ratio, of a whole response and clipped in the policy term alone, can be of any size.
                by = log_ratio_T.exp() if settings.loss_type == "rloo" else ratio.per_token(batch)
                kl_T = unbiased(kl_T, by, settings.kl_estimator)
            loss = policy + settings.beta * (scale_T * kl_T).sum()
    with torch.no_grad():
        metrics = _metrics(
            batch, settings, loss=loss, policy=policy, kl_T=kl_T, mask_T=mask_T, sizes_N=sizes_N, ratio=ratio
        )
    return LossResult(loss, metrics)


class _Ratio(NamedTuple):
    """Probability ratios with gradient: one per token, or one per response."""

    values: torch.Tensor
    per_row: bool

    def per_token(self, batch: LossBatch) -> torch.Tensor:
        return self.values[batch.row_T] if self.per_row else self.values


def _row_sum(values_T: torch.Tensor, batch: LossBatch) -> torch.Tensor:
    return values_T.new_zeros(batch.advantage_N.shape[0]).index_add(0, batch.row_T, values_T)


def _ratio(log_ratio_T: torch.Tensor, sizes_N: torch.Tensor, batch: LossBatch, settings: LossSettings) -> _Ratio:
    if settings.loss_type == "rloo":  # pi(response) / pi_old(response)
        return _Ratio(_row_sum(log_ratio_T, batch).exp(), True)
    if settings.level == "sequence":  # its geometric mean over the tokens
        return _Ratio((_row_sum(log_ratio_T, batch) / sizes_N.clamp(min=1.0)).exp(), True)
    return _Ratio(log_ratio_T.exp(), False)


def _policy_term(
    ratio_T: torch.Tensor, sizes_N: torch.Tensor, batch: LossBatch, settings: LossSettings
) -> torch.Tensor:
    """(T,) policy loss of each token, mismatch weight included."""
    advantage_T = batch.advantage_N[batch.row_T]
    if settings.loss_type == "cispo":
        policy_T = -ratio_T.clamp(max=settings.epsilon_high).detach() * advantage_T * batch.logp_T
    else:
        clipped_T = ratio_T.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
        free_T = ratio_T if settings.delta is None else ratio_T.clamp(max=settings.delta)
        policy_T = -torch.min(free_T * advantage_T, clipped_T * advantage_T)
    if settings.loss_type == "rloo":  # a loss per response, spread over its tokens
        policy_T = policy_T / sizes_N.clamp(min=1.0)[batch.row_T]
    return policy_T if batch.weight_T is None else policy_T * batch.weight_T


def _scale(sizes_N: torch.Tensor, totals: LossTotals, settings: LossSettings) -> torch.Tensor:
    """(N,) factor of every token of a response: the whole normalisation."""
    kind = settings.loss_type
    if kind == "grpo":  # mean over responses of the mean over tokens
        return 1.0 / (sizes_N.clamp(min=1.0) * totals.num_rows)
    ones_N = torch.ones_like(sizes_N)
    if kind in ("bnpo", "reinforce_pp"):  # mean over the step's tokens
        return ones_N / max(totals.num_tokens, 1)
    if kind in ("dapo", "cispo"):  # mean over the rollout's tokens, per optimizer step
        return ones_N / totals.mean_step_tokens
    if kind == "dr_grpo":  # constant length
        return ones_N / (totals.num_rows * settings.max_completion_length)
    if kind == "rloo":  # mean over responses of the sum over tokens
        return ones_N / totals.num_rows
    raise ValueError(f"unknown loss type {kind!r}")


def _metrics(
    batch: LossBatch,
    settings: LossSettings,
    *,
    loss: torch.Tensor,
    policy: torch.Tensor,
    kl_T: torch.Tensor | None,
    mask_T: torch.Tensor,
    sizes_N: torch.Tensor,
    ratio: _Ratio,
) -> MetricSums:
    num_tokens = sizes_N.double().sum()
    means: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if kl_T is not None:
        means["kl"] = (kl_T.double().sum(), num_tokens)
    if batch.entropy_T is not None:
        means["entropy"] = (torch.where(mask_T, batch.entropy_T, 0.0).double().sum(), num_tokens)
    values = ratio.values.detach()
    kept, advantage = (batch.counts_N, batch.advantage_N) if ratio.per_row else (mask_T, batch.advantage_N[batch.row_T])
    num_ratios = kept.double().sum()
    means["ratio/mean"] = (torch.where(kept, values, 0.0).double().sum(), num_ratios)
    minima = {"ratio/min": _smallest(values, kept)}
    maxima = {"ratio/max": _largest(values, kept)}
    if settings.loss_type == "cispo":
        over = kept & (values > settings.epsilon_high) & (advantage > 0)
        means["cispo_clip_ratio"] = (over.double().sum(), num_ratios)
    else:
        free = values if settings.delta is None else values.clamp(max=settings.delta)
        low = kept & (free < 1 - settings.epsilon_low) & (advantage < 0)
        high = kept & (free > 1 + settings.epsilon_high) & (advantage > 0)
        for name, flags in (("low", low), ("high", high), ("region", low | high)):
            means[f"clip_ratio/{name}_mean"] = (flags.double().sum(), num_ratios)
        minima["clip_ratio/low_min"] = _smallest(_row_mean(low, sizes_N, ratio, batch), batch.counts_N)
        maxima["clip_ratio/high_max"] = _largest(_row_mean(high, sizes_N, ratio, batch), batch.counts_N)
    sums = {"loss": loss.detach().double(), "policy_loss": policy.detach().double()}
    return MetricSums(sums, means, minima, maxima)


def _row_mean(flags: torch.Tensor, sizes_N: torch.Tensor, ratio: _Ratio, batch: LossBatch) -> torch.Tensor:
    """(N,) share of a response's ratios that are flagged."""
    if ratio.per_row:
        return flags.double()
    return _row_sum(flags.double(), batch) / sizes_N.double()


def _smallest(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Minimum of the kept values; inf when there is none."""
    kept_or_inf = torch.where(kept, values.double(), torch.inf)
    return torch.cat([kept_or_inf, kept_or_inf.new_full((1,), torch.inf)]).min()


def _largest(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Maximum of the kept values; -inf when there is none."""
    return -_smallest(-values.double(), kept)
