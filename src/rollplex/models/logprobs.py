"""Log-probs of chosen tokens and entropy straight from hidden states, without keeping logits.

The output head is run in row chunks of bounded size, in the forward pass and again in the backward pass, so that memory
does not grow with tokens x vocabulary. Softmax statistics are taken in at least fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rollplex.models.attention import accumulation_dtype

# Logits held at once, in elements.
MAX_LOGIT_ELEMENTS = 1 << 24


class TokenLogps(NamedTuple):
    """Per-token results, (T,) each, in `accumulation_dtype`."""

    logps: torch.Tensor  # log pi(token), at the sampling temperature
    entropies: torch.Tensor  # entropy of the same distribution, no gradient


def token_logps(
    hidden_TC: torch.Tensor, weight_VC: torch.Tensor, tokens_T: torch.Tensor, temperature: float
) -> TokenLogps:
    """log softmax(hidden @ weight.T / temperature) at `tokens_T`, and that distribution's entropy."""
    logps, entropies = _TokenLogps.apply(hidden_TC, weight_VC, tokens_T, temperature)
    return TokenLogps(logps, entropies)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TC: torch.Tensor, weight_VC: torch.Tensor, tokens_T: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        math = accumulation_dtype(hidden_TC.dtype)
        num = hidden_TC.shape[0]
        logps, entropies, lse = (hidden_TC.new_empty(num, dtype=math) for _ in range(3))
        for part in _chunks(num, weight_VC.shape[0]):
            scores = torch.mm(hidden_TC[part], weight_VC.t()).to(math).div_(temperature)
            lse[part] = scores.logsumexp(-1)
            logps[part] = scores.gather(1, tokens_T[part, None]).squeeze(1) - lse[part]
            scores.sub_(lse[part, None])
            probs = scores.exp()
            # p * log p is 0 where p underflows to 0, also where log p is -inf
            entropies[part] = -(probs * scores.clamp_min(torch.finfo(math).min)).sum(-1)
        ctx.save_for_backward(hidden_TC, weight_VC, tokens_T, lse)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TC, weight_VC, tokens_T, lse_T = ctx.saved_tensors
        grad_T = grads[0]
        math = lse_T.dtype
        grad_hidden = torch.empty_like(hidden_TC) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VC, dtype=math) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden_TC.shape[0], weight_VC.shape[0]):
            scores = torch.mm(hidden_TC[part], weight_VC.t()).to(math).div_(ctx.temperature)
            probs = scores.sub_(lse_T[part, None]).exp_()
            scale = grad_T[part, None] / ctx.temperature
            grad_logits = probs.mul_(-scale).scatter_add_(1, tokens_T[part, None], scale.to(math))
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(grad_logits.to(weight_VC.dtype), weight_VC)
            if grad_weight is not None:
                grad_weight += torch.mm(grad_logits.to(hidden_TC.dtype).t(), hidden_TC[part])
        grad_weight = grad_weight.to(weight_VC.dtype) if grad_weight is not None else None
        return grad_hidden, grad_weight, None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    rows = max(1, MAX_LOGIT_ELEMENTS // vocab_size)
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
