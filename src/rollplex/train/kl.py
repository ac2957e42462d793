"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - ref_logp of one token sampled by the policy (Schulman 2020, "Approximating KL divergence"):
    k1 = d                      unbiased, can be negative, high variance
    k2 = d^2 / 2                biased, never negative; its gradient is an unbiased gradient of the KL
    k3 = exp(-d) - 1 + d        unbiased, never negative; what TRL's GRPO adds to its loss
"""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]


def token_kl(logp_T: torch.Tensor, ref_logp_T: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token KL estimate in nats, same shape and dtype as `logp_T`; differentiable in `logp_T`."""
    difference_T = logp_T - ref_logp_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator == "k3":
        return torch.expm1(-difference_T) + difference_T
    raise ValueError(f"unknown KL estimator {estimator!r}, needed k1, k2 or k3")


def response_kl(
    logp_T: torch.Tensor, ref_logp_T: torch.Tensor, row_T: torch.Tensor, num_rows: int, estimator: KlEstimator
) -> torch.Tensor:
    """(N,) KL estimate of whole responses in nats: the sum over their tokens, no gradient. For `kl_in_reward`.

    `row_T` (int64) gives the response of each packed token.
    """
    kl_T = token_kl(logp_T.detach(), ref_logp_T, estimator)
    return kl_T.new_zeros(num_rows).index_add(0, row_T, kl_T)
