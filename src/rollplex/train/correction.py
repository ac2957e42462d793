"""Correction of the mismatch between the engine that sampled and the trainer that learns.

The same weights give slightly different log-probs in two implementations. The importance ratio
w = exp(logp_trainer - logp_sampled), per token or per response (product over its tokens), multiplies the policy loss;
above `clip_max` it is truncated to it, or masked to 0. Formulas and modes are TRL's `vllm_importance_sampling_*`.
The raw ratios are measured before anything is cut, so the mismatch stays visible (trl#5231).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch

from rollplex.config_algorithm import CorrectionMode


@dataclass(frozen=True, slots=True)
class MismatchStats:
    """What some responses showed; `merge` gives exactly the stats of their union. Plain floats."""

    num_tokens: int  # counted tokens that have a sampling log-prob
    num_missing: int  # counted tokens without one (NaN); their ratio is 1
    gap_sum: float  # sum of |logp_trainer - logp_sampled|
    gap_max: float
    num_ratios: int  # counted tokens, or counted responses in the sequence modes
    raw_log_min: float  # of log w, before the cut
    raw_log_max: float
    raw_log_sum: float  # log of sum w; logs, since a sequence ratio can overflow
    raw_log_sum_squares: float  # log of sum w^2
    num_truncated: int
    num_masked: int
    applied_sum: float  # of the weights that multiply the loss
    applied_min: float
    applied_max: float

    def merge(self, other: MismatchStats) -> MismatchStats:
        """The stats of both sets of responses together."""
        return MismatchStats(
            self.num_tokens + other.num_tokens,
            self.num_missing + other.num_missing,
            self.gap_sum + other.gap_sum,
            max(self.gap_max, other.gap_max),
            self.num_ratios + other.num_ratios,
            min(self.raw_log_min, other.raw_log_min),
            max(self.raw_log_max, other.raw_log_max),
            _log_add(self.raw_log_sum, other.raw_log_sum),
            _log_add(self.raw_log_sum_squares, other.raw_log_sum_squares),
            self.num_truncated + other.num_truncated,
            self.num_masked + other.num_masked,
            self.applied_sum + other.applied_sum,
            min(self.applied_min, other.applied_min),
            max(self.applied_max, other.applied_max),
        )

    def metrics(self) -> dict[str, float]:
        """Final values: TRL's `sampling/*` names, and ours for the raw ratios.

        As in TRL, `sampling/importance_sampling_ratio/*` are the weights as applied. `sampling/raw_ratio/*` are those
        before the cut, `sampling/effective_sample_size` is (sum w)^2 / (n sum w^2) of the raw ratios in (0, 1].
        Nothing counted: no keys.
        """
        if self.num_ratios == 0:
            return {}
        log_n = math.log(self.num_ratios)
        return {
            "sampling/sampling_logp_difference/mean": self.gap_sum / max(self.num_tokens, 1),
            "sampling/sampling_logp_difference/max": self.gap_max,
            "sampling/importance_sampling_ratio/min": self.applied_min,
            "sampling/importance_sampling_ratio/mean": self.applied_sum / self.num_ratios,
            "sampling/importance_sampling_ratio/max": self.applied_max,
            "sampling/raw_ratio/min": _exp(self.raw_log_min),
            "sampling/raw_ratio/mean": _exp(self.raw_log_sum - log_n),
            "sampling/raw_ratio/max": _exp(self.raw_log_max),
            "sampling/effective_sample_size": _exp(2 * self.raw_log_sum - self.raw_log_sum_squares - log_n),
            "sampling/truncated_fraction": self.num_truncated / self.num_ratios,
            "sampling/masked_fraction": self.num_masked / self.num_ratios,
            "sampling/missing_logp_fraction": self.num_missing / max(self.num_tokens + self.num_missing, 1),
        }


class Correction(NamedTuple):
    """Weights for `LossBatch.weight_T`, and what was measured."""

    weight_T: torch.Tensor | None  # (T,) no gradient; None when the mode is off
    stats: MismatchStats


def merge_stats(parts: Iterable[MismatchStats]) -> MismatchStats:
    """Stats of the union of disjoint sets of responses; of an empty one too."""
    return reduce(MismatchStats.merge, parts, _EMPTY)


@torch.no_grad()
def mismatch_correction(
    logp_T: torch.Tensor,
    sampling_logp_T: torch.Tensor,
    row_T: torch.Tensor,
    counts_N: torch.Tensor,
    *,
    mode: CorrectionMode,
    clip_max: float,
) -> Correction:
    """Weights and stats of whole, packed responses.

    logp_T: the trainer's log-probs under the weights that sampled. sampling_logp_T: the engine's, at the same
    temperature; NaN where it has none (ratio 1 there, counted in the stats). row_T (int64): response of each token.
    counts_N (bool): responses that count; the others get weights too but stay out of the stats. With mode "off" the
    ratios are measured per token and no weight is returned.
    """
    counts_T = counts_N[row_T]
    difference_T = logp_T - sampling_logp_T
    missing_T = torch.isnan(difference_T)
    log_w = difference_T.masked_fill(missing_T, 0.0)
    counted = counts_T
    by_sequence = mode in ("sequence_truncate", "sequence_mask")
    if by_sequence:
        log_w = log_w.new_zeros(counts_N.shape[0]).index_add(0, row_T, log_w)
        counted = counts_N
    weight = torch.exp(log_w)
    over = weight > clip_max
    if mode in ("token_truncate", "sequence_truncate"):
        weight = weight.clamp(max=clip_max)
    elif mode in ("token_mask", "sequence_mask"):
        weight = weight.masked_fill(over, 0.0)
    elif mode != "off":
        raise ValueError(f"unknown mismatch correction {mode!r}")
    gap = difference_T[counts_T & ~missing_T].abs()
    num_missing = int((counts_T & missing_T).sum())
    stats = _stats(gap, num_missing, log_w=log_w[counted], weight=weight[counted], over=over[counted], mode=mode)
    if mode == "off":
        return Correction(None, stats)
    return Correction(weight[row_T] if by_sequence else weight, stats)


def _stats(
    gap: torch.Tensor,
    num_missing: int,
    *,
    log_w: torch.Tensor,
    weight: torch.Tensor,
    over: torch.Tensor,
    mode: CorrectionMode,
) -> MismatchStats:
    if log_w.numel() == 0:
        return _EMPTY
    log_w, weight, gap = log_w.double(), weight.double(), gap.double()
    numbers = torch.stack(
        [
            gap.sum(),
            gap.max() if gap.numel() else gap.new_zeros(()),
            log_w.min(),
            log_w.max(),
            log_w.logsumexp(0),
            (2 * log_w).logsumexp(0),
            over.sum().double(),
            weight.sum(),
            weight.min(),
            weight.max(),
        ]
    ).tolist()  # one transfer from the device
    gap_sum, gap_max, low, high, log_sum, log_squares, num_over, total, smallest, largest = numbers
    return MismatchStats(
        num_tokens=gap.numel(),
        num_missing=num_missing,
        gap_sum=gap_sum,
        gap_max=gap_max,
        num_ratios=log_w.numel(),
        raw_log_min=low,
        raw_log_max=high,
        raw_log_sum=log_sum,
        raw_log_sum_squares=log_squares,
        num_truncated=int(num_over) if mode.endswith("truncate") else 0,
        num_masked=int(num_over) if mode.endswith("mask") else 0,
        applied_sum=total,
        applied_min=smallest,
        applied_max=largest,
    )


_EMPTY = MismatchStats(
    num_tokens=0,
    num_missing=0,
    gap_sum=0.0,
    gap_max=0.0,
    num_ratios=0,
    raw_log_min=math.inf,
    raw_log_max=-math.inf,
    raw_log_sum=-math.inf,
    raw_log_sum_squares=-math.inf,
    num_truncated=0,
    num_masked=0,
    applied_sum=0.0,
    applied_min=math.inf,
    applied_max=-math.inf,
)


def _log_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def _exp(value: float) -> float:
    """exp that answers inf instead of raising."""
    return math.exp(value) if value < 709.0 else math.inf
