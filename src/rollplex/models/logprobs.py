"""Log-probs of chosen tokens and entropy straight from hidden states, without keeping logits.

The output head is run in row chunks of bounded size, in the forward pass and again in the backward pass, so that memory
does not grow with tokens x vocabulary. Softmax statistics are taken in at least fp32. Of a vocabulary that is divided
among ranks each rank computes its part of the logits; only one number per token crosses: log-sum-exp, chosen, entropy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rollplex.models.partial_attention import accumulation_dtype
from rollplex.models.ranks import VocabPart

# Logits held at once, in elements.
MAX_LOGIT_ELEMENTS = 1 << 24


class TokenLogps(NamedTuple):
    """Per-token results, (T,) each, in `accumulation_dtype`."""

    logps: torch.Tensor  # log pi(token), at the sampling temperature
    entropies: torch.Tensor  # entropy of the same distribution, no gradient


def token_logps(
    hidden_TC: torch.Tensor,
    weight_VC: torch.Tensor,
    tokens_T: torch.Tensor,
    temperature: float,
    part: VocabPart | None = None,
) -> TokenLogps:
    """log softmax(hidden @ weight.T / temperature) at `tokens_T`, and that distribution's entropy.

    part: what `weight_VC` holds of a vocabulary that several ranks share; absent: all of it. Tokens are always ids of
    the whole vocabulary, and every rank gets the same result.
    """
    if part is not None and part.ranks.size > 1:
        hidden_TC, weight_VC = part.ranks.enter(hidden_TC), weight_VC[: part.rows]
    else:
        part = None
    logps, entropies = _TokenLogps.apply(hidden_TC, weight_VC, tokens_T, temperature, part)
    return TokenLogps(logps, entropies)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd passes positionally
        ctx: Any,
        hidden_TC: torch.Tensor,
        weight_VC: torch.Tensor,
        tokens_T: torch.Tensor,
        temperature: float,
        vocab: VocabPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        math = accumulation_dtype(hidden_TC.dtype)
        num = hidden_TC.shape[0]
        logps, entropies, lse = (hidden_TC.new_empty(num, dtype=math) for _ in range(3))
        for part in _chunks(num, weight_VC, vocab):
            scores = torch.mm(hidden_TC[part], weight_VC.t()).to(math).div_(temperature)
            lse[part] = _over_ranks(scores.logsumexp(-1), vocab)
            logps[part] = _chosen(scores, tokens_T[part], vocab) - lse[part]
            scores.sub_(lse[part, None])
            probs = scores.exp()
            # p * log p is 0 where p underflows to 0, also where log p is -inf
            entropies[part] = -(probs * scores.clamp_min(torch.finfo(math).min)).sum(-1)
        if vocab is not None:
            entropies = vocab.ranks.total(entropies)
        ctx.save_for_backward(hidden_TC, weight_VC, tokens_T, lse)
        ctx.temperature, ctx.vocab = temperature, vocab
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TC, weight_VC, tokens_T, lse_T = ctx.saved_tensors
        grad_T, vocab = grads[0], ctx.vocab
        math = lse_T.dtype
        grad_hidden = torch.empty_like(hidden_TC) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VC, dtype=math) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden_TC.shape[0], weight_VC, vocab):
            scores = torch.mm(hidden_TC[part], weight_VC.t()).to(math).div_(ctx.temperature)
            probs = scores.sub_(lse_T[part, None]).exp_()
            scale = grad_T[part, None] / ctx.temperature
            grad_logits = probs.mul_(-scale)
            _add_to_chosen(grad_logits, tokens_T[part], scale.to(math), vocab)
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(grad_logits.to(weight_VC.dtype), weight_VC)
            if grad_weight is not None:
                grad_weight += torch.mm(grad_logits.to(hidden_TC.dtype).t(), hidden_TC[part])
        grad_weight = grad_weight.to(weight_VC.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None, None


def _over_ranks(lse_T: torch.Tensor, vocab: VocabPart | None) -> torch.Tensor:
    """Log-sum-exp over the whole vocabulary from that over this rank's part."""
    return lse_T if vocab is None else vocab.ranks.join(lse_T).logsumexp(0)


def _chosen(scores_TV: torch.Tensor, tokens_T: torch.Tensor, vocab: VocabPart | None) -> torch.Tensor:
    """The scores of `tokens_T`, each from the rank that has it."""
    if vocab is None:
        return scores_TV.gather(1, tokens_T[:, None]).squeeze(1)
    found_T = scores_TV.new_zeros(tokens_T.shape)
    places_T, mine_T = vocab.places(tokens_T)
    rows_T = mine_T.nonzero().squeeze(1)
    found_T[rows_T] = scores_TV[rows_T, places_T[rows_T]]
    return vocab.ranks.total(found_T)


def _add_to_chosen(
    grad_TV: torch.Tensor, tokens_T: torch.Tensor, scale_T1: torch.Tensor, vocab: VocabPart | None
) -> None:
    """Add `scale_T1` at the tokens that this rank has."""
    if vocab is None:
        grad_TV.scatter_add_(1, tokens_T[:, None], scale_T1)
        return
    places_T, mine_T = vocab.places(tokens_T)
    rows_T = mine_T.nonzero().squeeze(1)
    grad_TV[rows_T, places_T[rows_T]] += scale_T1[rows_T, 0]


def _chunks(num_rows: int, weight_VC: torch.Tensor, vocab: VocabPart | None) -> list[slice]:
    """The same on every rank, whatever padding it holds: collectives run once per chunk."""
    rows = max(1, MAX_LOGIT_ELEMENTS // (weight_VC.shape[0] if vocab is None else vocab.padded))
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
