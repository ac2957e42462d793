"""From logits to tokens: keyed uniforms, the usual filters, and inverse-CDF sampling.

Filters follow transformers' order: repetition penalty, banned ids, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import numpy as np
import torch

from rollplex.rollout.engine import SamplingParams


def keyed_uniforms(seed: int, rollout_id: int, response_index: int, num_tokens: int) -> np.ndarray:
    """`num_tokens` uniforms in [0, 1) that depend on the key alone (Philox counter generator), float64."""
    key = np.random.SeedSequence((seed, rollout_id, response_index))
    return np.random.Generator(np.random.Philox(key)).random(num_tokens)


def keyed_seed(seed: int, rollout_id: int, response_index: int) -> int:
    """A seed in [0, 2**63) that depends on the key alone, for engines that draw their own random numbers."""
    key = np.random.SeedSequence((seed, rollout_id, response_index))
    return int(key.generate_state(1, np.uint64)[0] >> np.uint64(1))


def penalised(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty: positive logits of seen tokens are divided by it, negative ones multiplied."""
    changed = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, changed, logits_BV)


def filtered(scores_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores (already divided by the temperature) with everything outside top-k, top-p and min-p at -inf."""
    vocab = scores_BV.shape[-1]
    if 0 < params.top_k < vocab:
        kth = scores_BV.topk(params.top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth, float("-inf"))
    if params.top_p < 1.0:
        ordered, index = scores_BV.sort(dim=-1)  # ascending: the tail that sums to at most 1 - top_p goes
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[:, -1] = False
        scores_BV = scores_BV.masked_fill(drop.scatter(1, index, drop), float("-inf"))
    if params.min_p > 0.0:
        probs = scores_BV.softmax(-1)
        floor = params.min_p * probs.amax(-1, keepdim=True)
        scores_BV = scores_BV.masked_fill(probs < floor, float("-inf"))
    return scores_BV


def draw(scores_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sample per row: the first token whose cumulative probability exceeds the uniform.

    A token of probability 0 (score -inf) is never drawn. Double precision: the CDF of a large vocabulary needs it.
    """
    cdf_BV = scores_BV.double().softmax(-1).cumsum(-1)
    targets_B1 = (uniforms_B * cdf_BV[:, -1]).unsqueeze(-1)
    picks_B = torch.searchsorted(cdf_BV, targets_B1, right=True).squeeze(-1)
    # u * total can round up to total: then the last token with probability, where the CDF first reaches its end
    last_B = (cdf_BV < cdf_BV[:, -1:]).sum(-1)
    return torch.minimum(picks_B, last_B)
