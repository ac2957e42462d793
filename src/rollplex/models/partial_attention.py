"""Attention over one part of the keys, with the log-sum-exp that lets parts be joined exactly.

Two parts of a softmax row join as out = sum_i out_i * exp(lse_i - lse), lse = logaddexp_i(lse_i). On the CPU the fused
kernel behind scaled_dot_product_attention gives both and its backward takes the joint values; elsewhere the same
formulas run in plain tensor operations, in blocks of bounded size.

Shape letters: B batch, H heads (equal for q, k and v), S queries, P keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Largest block of attention scores that the plain path holds at once, in elements.
MAX_SCORE_ELEMENTS = 1 << 26

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of boundary gradients, softmax and log-sum-exp: fp64 stays, everything else is fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(q_BHSD: torch.Tensor, k_BHPD: torch.Tensor, v_BHPD: torch.Tensor, *, causal: bool, scaling: float) -> Pair:
    """(out (B, H, S, D), lse (B, H, S)). causal: query s sees keys 0..s."""
    if q_BHSD.device.type == "cpu":
        out, lse = _FUSED(q_BHSD, k_BHPD, v_BHPD, 0.0, causal, scale=scaling)
        return out, lse
    return _plain(q_BHSD, k_BHPD, v_BHPD, causal, scaling)


def attend_backward(  # noqa: PLR0917 the six tensors of attention, in the order of the kernel that takes them
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BHPD: torch.Tensor,
    v_BHPD: torch.Tensor,
    out_BHSD: torch.Tensor,
    lse_BHS: torch.Tensor,
    *,
    causal: bool,
    scaling: float,
) -> Triple:
    """This part's share of (dq, dk, dv); `out` and `lse` are those of the joint row."""
    if q_BHSD.device.type == "cpu":
        got = _FUSED_BACKWARD(
            grad_BHSD, q_BHSD, k_BHPD, v_BHPD, out_BHSD, lse_BHS.contiguous(), 0.0, causal, scale=scaling
        )
        return got[0], got[1], got[2]
    return _plain_backward(grad_BHSD, q_BHSD, k_BHPD, v_BHPD, out_BHSD, lse_BHS, causal, scaling)


def _query_blocks(q_BHSD: torch.Tensor, num_keys: int) -> Iterator[slice]:
    batch, heads, queries, _ = q_BHSD.shape
    block = max(1, MAX_SCORE_ELEMENTS // (batch * heads * num_keys))
    for start in range(0, queries, block):
        yield slice(start, min(start + block, queries))


def _scores(q: torch.Tensor, k: torch.Tensor, part: slice, causal: bool, scaling: float) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scaling)
    if causal:
        queries = torch.arange(part.start, part.stop, device=q.device)
        future = torch.arange(k.shape[-2], device=q.device) > queries[:, None]
        scores.masked_fill_(future, float("-inf"))
    return scores


def _plain(q_BHSD: torch.Tensor, k_BHPD: torch.Tensor, v_BHPD: torch.Tensor, causal: bool, scaling: float) -> Pair:
    math = accumulation_dtype(q_BHSD.dtype)
    k, v = k_BHPD.to(math), v_BHPD.to(math)
    out, lse = torch.empty_like(q_BHSD), q_BHSD.new_empty(q_BHSD.shape[:3], dtype=math)
    for part in _query_blocks(q_BHSD, k.shape[2]):
        scores = _scores(q_BHSD[:, :, part].to(math), k, part, causal, scaling)
        lse[:, :, part] = scores.logsumexp(-1)
        weights = scores.sub_(lse[:, :, part, None]).exp_()
        out[:, :, part] = torch.matmul(weights, v)
    return out, lse


def _plain_backward(  # noqa: PLR0913, PLR0917 - the inputs of one formula
    grad_BHSD: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BHPD: torch.Tensor,
    v_BHPD: torch.Tensor,
    out_BHSD: torch.Tensor,
    lse_BHS: torch.Tensor,
    causal: bool,
    scaling: float,
) -> Triple:
    math = accumulation_dtype(q_BHSD.dtype)
    k, v = k_BHPD.to(math), v_BHPD.to(math)
    grad_q, grad_k, grad_v = torch.empty_like(q_BHSD), torch.zeros_like(k), torch.zeros_like(v)
    for part in _query_blocks(q_BHSD, k.shape[2]):
        q, grad = q_BHSD[:, :, part].to(math), grad_BHSD[:, :, part].to(math)
        weights = _scores(q, k, part, causal, scaling).sub_(lse_BHS[:, :, part, None]).exp_()
        grad_v += torch.matmul(weights.transpose(-1, -2), grad)
        delta = (grad * out_BHSD[:, :, part].to(math)).sum(-1, keepdim=True)
        grad_scores = torch.matmul(grad, v.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scaling)
        grad_q[:, :, part] = torch.matmul(grad_scores, k)
        grad_k += torch.matmul(grad_scores.transpose(-1, -2), q)
    return grad_q, grad_k, grad_v
