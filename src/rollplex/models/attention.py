"""Attention over packed tokens: causal within each prompt, and responses against one shared prefix.

`SharedPrefixAttention` is the heart of prefix sharing in training. All responses of a group read the prefix's keys and
values once (two-level attention: shared prefix, own suffix), and its backward adds the gradients of those keys and
values straight into the prefix's own accumulators in at least fp32, so that any split of a group into micro-batches
sums to the same boundary gradient (DESIGN.md section 2).

Shape letters: T packed tokens, H query heads, K key/value heads, E = H / K query heads per key/value head, D head dim,
P prefix tokens, N responses of a group in this pack, R longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

# Largest block of attention scores held at once, in elements. Past it the block is split over responses, then heads.
MAX_SCORE_ELEMENTS = 1 << 24


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of boundary gradients and softmax: fp64 stays, everything else is fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def causal_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, lengths: Sequence[int], scaling: float
) -> torch.Tensor:
    """Causal self-attention inside each of the packed sequences; (T, H * D)."""
    repeat = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = k_TKD.repeat_interleave(repeat, dim=1), v_TKD.repeat_interleave(repeat, dim=1)
    if len(set(lengths)) == 1:  # equal lengths (often a single prompt): one call
        batch = (len(lengths), lengths[0])
        q, k, v = (t.unflatten(0, batch).transpose(1, 2) for t in (q_THD, k_THD, v_THD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)
    outs = []
    for q, k, v in zip(q_THD.split(lengths), k_THD.split(lengths), v_THD.split(lengths), strict=True):
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=scaling
        )
        outs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outs)


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of one prompt in one layer, and where their gradients accumulate (None: not wanted)."""

    k_KPD: torch.Tensor
    v_KPD: torch.Tensor
    grad_k_KPD: torch.Tensor | None
    grad_v_KPD: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Where one group's responses lie among the packed tokens: rows [start, start + sum(lengths))."""

    start: int
    lengths: tuple[int, ...]  # tokens per response, each at least 1

    @property
    def num_tokens(self) -> int:
        """Packed tokens of this group."""
        return sum(self.lengths)

    def pad(self, x_tKD: torch.Tensor) -> torch.Tensor:
        """(t, K, D) packed rows of this group -> (K, N, R, D), zeros behind shorter responses."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return x_tKD.unflatten(0, (len(self.lengths), longest)).permute(2, 0, 1, 3)
        padded = x_tKD.new_zeros((len(self.lengths), longest, *x_tKD.shape[1:]))
        padded[self._mask(x_tKD.device)] = x_tKD
        return padded.permute(2, 0, 1, 3)

    def unpad(self, x_KNRD: torch.Tensor) -> torch.Tensor:
        """Inverse of `pad`: (t, K, D)."""
        x_NRKD = x_KNRD.permute(1, 2, 0, 3)
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return x_NRKD.flatten(0, 1)
        return x_NRKD[self._mask(x_KNRD.device)]

    def _mask(self, device: torch.device) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(max(self.lengths), device=device) < lengths[:, None]


class SharedPrefixAttention(torch.autograd.Function):
    """out_TH*D = attention of response queries over [their group's prefix, their own causal suffix].

    Prefix gradients are a side effect: they are added to `PrefixKV.grad_*`, not returned. `anchor` is any tensor that
    requires gradient when prefix gradients are wanted: it makes autograd call the backward even where q, k and v do
    not depend on a trainable parameter (first layers under LoRA).
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd passes positionally
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        anchor: torch.Tensor,
        groups: Sequence[GroupRows],
        prefixes: Sequence[PrefixKV],
        scaling: float,
    ) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=accumulation_dtype(q_THD.dtype))
        for rows, prefix in zip(groups, prefixes, strict=True):
            part = slice(rows.start, rows.start + rows.num_tokens)
            block = _GroupBlock(rows, q_THD[part], k_TKD[part], v_TKD[part], prefix, scaling)
            block.forward(out_THD[part], lse_TH[part])
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_TH)
        ctx.groups, ctx.prefixes, ctx.scaling = groups, prefixes, scaling
        return out_THD.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_TH = ctx.saved_tensors
        grad_out_THD = grads[0].view_as(out_THD)
        grad_q, grad_k, grad_v = torch.empty_like(q_THD), torch.empty_like(k_TKD), torch.empty_like(v_TKD)
        for rows, prefix in zip(ctx.groups, ctx.prefixes, strict=True):
            part = slice(rows.start, rows.start + rows.num_tokens)
            block = _GroupBlock(rows, q_THD[part], k_TKD[part], v_TKD[part], prefix, ctx.scaling)
            got = block.backward(grad_out_THD[part], out_THD[part], lse_TH[part])
            grad_q[part], grad_k[part], grad_v[part] = got
        return grad_q, grad_k, grad_v, None, None, None, None


class _GroupBlock:
    """One group's attention, forward and backward, in blocks of bounded size. Internal math in `accumulation_dtype`."""

    def __init__(  # noqa: PLR0913, PLR0917 - mirrors the autograd function's arguments
        self,
        rows: GroupRows,
        q_tHD: torch.Tensor,
        k_tKD: torch.Tensor,
        v_tKD: torch.Tensor,
        prefix: PrefixKV,
        scaling: float,
    ):
        math = accumulation_dtype(q_tHD.dtype)
        self.rows, self.prefix, self.scaling, self.math = rows, prefix, scaling, math
        self.num_kv = k_tKD.shape[1]
        self.repeat = q_tHD.shape[1] // self.num_kv
        self.q_KNSD = self._pad_queries(q_tHD.to(math))
        self.k_KNRD = rows.pad(k_tKD.to(math))
        self.v_KNRD = rows.pad(v_tKD.to(math))
        length = self.k_KNRD.shape[2]
        upper = torch.ones(length, length, dtype=torch.bool, device=q_tHD.device).triu(1)
        self.hidden_SR = upper.repeat(self.repeat, 1)  # future suffix keys, for S = E * R query rows

    def _pad_queries(self, x_tHD: torch.Tensor) -> torch.Tensor:
        """(t, H, D) -> (K, N, S, D) with S = E * R, query heads of one key/value head side by side."""
        x_HNRD = self.rows.pad(x_tHD)
        return x_HNRD.unflatten(0, (self.num_kv, self.repeat)).transpose(1, 2).flatten(2, 3)

    def _unpad_queries(self, x_KNSD: torch.Tensor) -> torch.Tensor:
        x_KNERD = x_KNSD.unflatten(2, (self.repeat, -1))
        return self.rows.unpad(x_KNERD.transpose(1, 2).flatten(0, 1))

    def _blocks(self) -> Iterator[tuple[slice, slice]]:
        """(heads, responses) slices whose score block stays within MAX_SCORE_ELEMENTS."""
        num_kv, num, queries, _ = self.q_KNSD.shape
        keys = self.prefix.k_KPD.shape[1] + self.k_KNRD.shape[2]
        one = queries * keys
        responses = max(1, min(num, MAX_SCORE_ELEMENTS // one))
        heads = max(1, min(num_kv, MAX_SCORE_ELEMENTS // (one * responses)))
        for head in range(0, num_kv, heads):
            for start in range(0, num, responses):
                yield slice(head, head + heads), slice(start, start + responses)

    def _scores(self, heads: slice, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled scores against the prefix (k, n, S, P) and the own suffix (k, n, S, R), future keys at -inf."""
        q = self.q_KNSD[heads, part] * self.scaling
        prefix_k = self.prefix.k_KPD[heads].to(self.math)
        to_prefix = torch.matmul(q.flatten(1, 2), prefix_k.transpose(1, 2)).unflatten(1, q.shape[1:3])
        to_suffix = torch.matmul(q, self.k_KNRD[heads, part].transpose(2, 3))
        return to_prefix, to_suffix.masked_fill_(self.hidden_SR, float("-inf"))

    def forward(self, out_tHD: torch.Tensor, lse_tH: torch.Tensor) -> None:
        """Fill the group's slices of the output and of the log-sum-exp."""
        out = torch.empty_like(self.q_KNSD)
        lse = self.q_KNSD.new_empty(*self.q_KNSD.shape[:3], 1)
        for heads, part in self._blocks():
            to_prefix, to_suffix = self._scores(heads, part)
            top = torch.maximum(to_prefix.amax(-1, keepdim=True), to_suffix.amax(-1, keepdim=True))
            to_prefix.sub_(top).exp_()
            to_suffix.sub_(top).exp_()
            total = to_prefix.sum(-1, keepdim=True) + to_suffix.sum(-1, keepdim=True)
            values = self.prefix.v_KPD[heads].to(self.math)
            mixed = torch.matmul(to_prefix.flatten(1, 2), values).unflatten(1, to_prefix.shape[1:3])
            mixed += torch.matmul(to_suffix, self.v_KNRD[heads, part])
            out[heads, part] = mixed / total
            lse[heads, part] = top + total.log()
        out_tHD.copy_(self._unpad_queries(out))
        lse_tH.copy_(self._unpad_queries(lse).squeeze(-1))

    def backward(
        self, grad_tHD: torch.Tensor, out_tHD: torch.Tensor, lse_tH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the group's packed q, k, v; the prefix's are added to its accumulators."""
        math = self.math
        grad_out = self._pad_queries(grad_tHD.to(math))
        delta = self._pad_queries((grad_tHD.to(math) * out_tHD.to(math)).sum(-1, keepdim=True))
        lse = self._pad_queries(lse_tH.unsqueeze(-1))
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (self.q_KNSD, self.k_KNRD, self.v_KNRD))
        for heads, part in self._blocks():
            to_prefix, to_suffix = self._scores(heads, part)
            d_out, q = grad_out[heads, part], self.q_KNSD[heads, part]
            weights = to_prefix.sub_(lse[heads, part]).exp_()
            keys, values = self.prefix.k_KPD[heads].to(math), self.prefix.v_KPD[heads].to(math)
            flat_out, flat_q = d_out.flatten(1, 2), q.flatten(1, 2)
            d_scores = torch.matmul(flat_out, values.transpose(1, 2)).unflatten(1, q.shape[1:3])
            d_scores.sub_(delta[heads, part]).mul_(weights).mul_(self.scaling)
            grad_q[heads, part] = torch.matmul(d_scores.flatten(1, 2), keys).unflatten(1, q.shape[1:3])
            if self.prefix.grad_k_KPD is not None and self.prefix.grad_v_KPD is not None:
                self.prefix.grad_k_KPD[heads] += torch.matmul(d_scores.flatten(1, 2).transpose(1, 2), flat_q)
                self.prefix.grad_v_KPD[heads] += torch.matmul(weights.flatten(1, 2).transpose(1, 2), flat_out)
            weights = to_suffix.sub_(lse[heads, part]).exp_()
            d_scores = torch.matmul(d_out, self.v_KNRD[heads, part].transpose(2, 3))
            d_scores.sub_(delta[heads, part]).mul_(weights).mul_(self.scaling)
            grad_q[heads, part] += torch.matmul(d_scores, self.k_KNRD[heads, part])
            grad_k[heads, part] = torch.matmul(d_scores.transpose(2, 3), q)
            grad_v[heads, part] = torch.matmul(weights.transpose(2, 3), d_out)
        return self._unpad_queries(grad_q), self.rows.unpad(grad_k), self.rows.unpad(grad_v)
