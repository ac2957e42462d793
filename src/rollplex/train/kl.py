"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - ref_logp of one token sampled by the policy (Schulman 2020, "Approximating KL divergence"):
    k1 = d                      unbiased, can be negative, high variance
    k2 = d^2 / 2                biased, never negative; its gradient is an unbiased gradient of the KL
    k3 = exp(-d) - 1 + d        unbiased, never negative; what TRL's GRPO adds to its loss

An unbiased value is not an unbiased gradient: the sample itself depends on the policy, which a derivative of the
estimator alone leaves out. `unbiased` brings it back through the ratio r = pi / pi_old of each sampled token
(DeepSeek-V3.2, arXiv 2512.02556; TRL's use_bias_correction_kl): d(r k)/dlogp = r (k + dk/dlogp), which is r d for k3
and has the KL's gradient as its mean under pi_old, on-policy too, where r is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def unbiased(kl_T: torch.Tensor, ratio_T: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """`token_kl` whose gradient is the KL's on average, whichever weights sampled, for a ratio per token. k2's is so
    already on-policy: the ratio weighs it and gets no gradient through it. A ratio of whole responses (`level`
    sequence) shares its gradient out among their tokens, and only k2 keeps that property: TRL's term all the same."""
    return kl_T * (ratio_T.detach() if estimator == "k2" else ratio_T)


def response_kl(
    logps: Sequence[torch.Tensor], ref_logps: Sequence[torch.Tensor], estimator: KlEstimator
) -> list[float]:
    """KL estimate of each whole response in nats: the sum over its tokens. For `kl_in_reward`."""
    pairs = zip(logps, ref_logps, strict=True)
    sums = [token_kl(logp_R.detach(), ref_logp_R, estimator).sum() for logp_R, ref_logp_R in pairs]
    values: list[float] = torch.stack(sums).tolist()
    return values
