"""From logits to tokens: keyed uniforms, the usual filters, and inverse-CDF sampling.

Filters follow transformers' order: repetition penalty, banned ids, temperature, top-k, top-p, min-p. Functions of
tensors are in the part of Python that TorchScript reads (uninterrupted.py).

Shape letters: B rows, V vocabulary.
"""

from typing import NamedTuple  # no postponed annotations: TorchScript reads those of tuples as they are

import numpy as np
import torch

from rollplex.models.partial_attention import accumulation_dtype


class Filters(NamedTuple):
    """What stands between logits and the scores that are drawn from; as `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    banned_ids: torch.Tensor | None  # never to be drawn


def keyed_uniforms(seed: int, rollout_id: int, response_index: int, num_tokens: int) -> np.ndarray:
    """`num_tokens` uniforms in [0, 1) that depend on the key alone (Philox counter generator), float64."""
    key = np.random.SeedSequence((seed, rollout_id, response_index))
    return np.random.Generator(np.random.Philox(key)).random(num_tokens)


def keyed_seed(seed: int, rollout_id: int, response_index: int) -> int:
    """A seed in [0, 2**63) that depends on the key alone, for engines that draw their own random numbers."""
    key = np.random.SeedSequence((seed, rollout_id, response_index))
    return int(key.generate_state(1, np.uint64)[0] >> np.uint64(1))


def choose(
    logits_BV: torch.Tensor, filters: Filters, seen_BV: torch.Tensor | None, uniforms_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (B,), their log-probs (B,): those of softmax(logits / temperature), before any filter).

    seen_BV: tokens that the repetition penalty is for; those that are chosen join them. uniforms_B: in [0, 1), None:
    the largest score.
    """
    wide_BV = logits_BV.to(accumulation_dtype(logits_BV.dtype))
    logps_BV = torch.log_softmax(wide_BV / filters.temperature, dim=-1)
    if seen_BV is not None:
        wide_BV = penalised(wide_BV, seen_BV, filters.repetition_penalty)
    scores_BV = wide_BV / filters.temperature
    banned_ids = filters.banned_ids
    if banned_ids is not None:
        scores_BV = scores_BV.index_fill(1, banned_ids, float("-inf"))
    if uniforms_B is None:
        tokens_B = scores_BV.argmax(-1)
    else:
        tokens_B = draw(filtered(scores_BV, filters), uniforms_B)
    if seen_BV is not None:
        seen_BV.scatter_(1, tokens_B[:, None], True)
    return tokens_B, logps_BV.gather(1, tokens_B[:, None]).squeeze(1)


def penalised(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty: positive logits of seen tokens are divided by it, negative ones multiplied."""
    changed = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, changed, logits_BV)


def filtered(scores_BV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Scores (already divided by the temperature) with everything outside top-k, top-p and min-p at -inf."""
    vocab = scores_BV.shape[-1]
    if 0 < filters.top_k < vocab:
        kth = scores_BV.topk(filters.top_k, dim=-1)[0][:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth, float("-inf"))
    if filters.top_p < 1.0:
        ordered, index = scores_BV.sort(dim=-1)  # ascending: the tail that sums to at most 1 - top_p goes
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - filters.top_p
        drop[:, -1] = False
        scores_BV = scores_BV.masked_fill(drop.scatter(1, index, drop), float("-inf"))
    if filters.min_p > 0.0:
        probs = scores_BV.softmax(-1)
        floor = filters.min_p * probs.amax(-1, keepdim=True)
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
