"""Attention over packed tokens: causal within each prompt, and responses against one shared prefix.

`SharedPrefixAttention` is the heart of prefix sharing in training. All responses of a group read the prefix's keys and
values once (two-level attention: shared prefix, own suffix), and its backward adds the gradients of those keys and
values straight into the prefix's own accumulators in at least fp32, so that any split of a group into micro-batches
sums to the same boundary gradient (DESIGN.md section 2).

Shape letters: T packed tokens, H query heads, K key/value heads, E = H / K query heads per key/value head, D head dim,
G equally shaped groups, P prefix tokens, N responses of a group (or of G groups, flattened), R longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from rollplex.models.partial_attention import accumulation_dtype, attend, attend_backward
from rollplex.models.row_chunks import RowChunks, even_parts, joined


def causal_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, chunks: RowChunks, scaling: float
) -> torch.Tensor:
    """Causal self-attention inside each of the packed prompts; (T, H * D). Equal neighbours share one call, a prompt
    longer than a chunk has several."""
    # Without a graph a CPU reads shared heads where they lie, the same bits. A graph's memory is planned with copies;
    # kernels of 16 bits pack or not by the number of heads, with other bits on some processors.
    wide = q_THD.dtype in {torch.float32, torch.float64}
    grouped = wide and q_THD.device.type == "cpu" and not torch.is_grad_enabled()
    if not grouped:
        repeat = q_THD.shape[1] // k_TKD.shape[1]
        k_TKD, v_TKD = k_TKD.repeat_interleave(repeat, dim=1), v_TKD.repeat_interleave(repeat, dim=1)
    runs, whole = chunks.runs(), (q_THD, k_TKD, v_TKD)
    sizes = [length * count for length, count in runs]
    prompts = [whole] if len(runs) == 1 else zip(*(x.split(sizes) for x in whole), strict=True)
    outs: list[torch.Tensor] = []
    for (length, count), parts in zip(runs, prompts, strict=True):
        q, k, v = (by_run(x, count, length) for x in parts)
        for out_NHSD in _causal_parts(q, k, v, chunks, scaling, grouped=grouped):
            outs.append(out_NHSD.transpose(1, 2).reshape(count * out_NHSD.shape[2], -1))
    return joined(outs)


def by_run(x_THD: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """(count * length, H, D) -> (count, H, length, D), as attention takes `count` runs of rows."""
    if torch.is_grad_enabled():
        return x_THD.view(count, length, *x_THD.shape[1:]).transpose(1, 2)
    # The same view in one call (norms.py), which has a costly backward.
    row, head, last = x_THD.stride()
    shape = count, x_THD.shape[1], length, x_THD.shape[2]
    return x_THD.as_strided(shape, (length * row, head, row, last), x_THD.storage_offset())


def _causal_parts(
    q_NHPD: torch.Tensor,
    k_NKPD: torch.Tensor,
    v_NKPD: torch.Tensor,
    chunks: RowChunks,
    scaling: float,
    *,
    grouped: bool,
) -> Iterator[torch.Tensor]:
    """(N, H, S, D) of S positions after another; all of them at once unless N is 1."""
    queries = even_parts(q_NHPD.shape[2], chunks.limit)
    if len(queries) == 1:
        yield F.scaled_dot_product_attention(q_NHPD, k_NKPD, v_NKPD, is_causal=True, scale=scaling, enable_gqa=grouped)
        return
    seen = 0
    for q_NHSD in q_NHPD.split(queries, dim=2):
        seen += q_NHSD.shape[2]
        mask, k, v = chunks.mask(q_NHSD.shape[2], seen), k_NKPD[:, :, :seen], v_NKPD[:, :, :seen]
        yield F.scaled_dot_product_attention(q_NHSD, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """Keys and values of some equally long prompts in one layer, and where their gradients accumulate (None: not
    wanted)."""

    k_GKPD: torch.Tensor
    v_GKPD: torch.Tensor
    grad_k_GKPD: torch.Tensor | None
    grad_v_GKPD: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Where the responses of G groups of N lie among the packed tokens: rows [start, start + sum(lengths))."""

    start: int
    lengths: tuple[int, ...]  # tokens per response, G * N of them, each at least 1
    num_groups: int

    @property
    def num_tokens(self) -> int:
        """Packed tokens of these groups."""
        return sum(self.lengths)

    def pad(self, x_tHD: torch.Tensor) -> torch.Tensor:
        """(t, H, D) packed rows -> (G * N, H, R, D), zeros behind shorter responses."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return by_run(x_tHD, len(self.lengths), longest)
        padded = x_tHD.new_zeros((len(self.lengths), longest, *x_tHD.shape[1:]))
        padded[self._mask(x_tHD.device)] = x_tHD
        return padded.transpose(1, 2)

    def unpad(self, x_NHRD: torch.Tensor) -> torch.Tensor:
        """Inverse of `pad`: (t, H, D)."""
        x_NRHD = x_NHRD.transpose(1, 2)
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return x_NRHD.flatten(0, 1)
        return x_NRHD[self._mask(x_NHRD.device)]

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
    """Attention of equally shaped groups as two partial attentions, prefix and suffix, joined by their log-sum-exp.

    The backward of each part with the joint output and log-sum-exp gives its exact share of the gradient: the softmax
    weights are exp(score - joint lse), and the correction term sum(grad * out) is that of the whole row.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - mirrors the autograd function's arguments
        self,
        rows: GroupRows,
        q_tHD: torch.Tensor,
        k_tKD: torch.Tensor,
        v_tKD: torch.Tensor,
        prefix: PrefixKV,
        scaling: float,
    ):
        self.rows, self.prefix, self.scaling = rows, prefix, scaling
        self.num_kv = k_tKD.shape[1]
        self.repeat = q_tHD.shape[1] // self.num_kv
        self.q_NHRD = rows.pad(q_tHD)
        # each key/value head once per query head that reads it
        self.k_NHRD = rows.pad(k_tKD).repeat_interleave(self.repeat, dim=1)
        self.v_NHRD = rows.pad(v_tKD).repeat_interleave(self.repeat, dim=1)

    def _flat(self, x_NHRD: torch.Tensor) -> torch.Tensor:
        """(G * N, H, R, D) -> (G, K, N * E * R, D): all queries of a group that read one key/value head."""
        groups, (_, _, length, last) = self.rows.num_groups, x_NHRD.shape
        x_GNKSD = x_NHRD.reshape(groups, -1, self.num_kv, self.repeat * length, last)
        return x_GNKSD.transpose(1, 2).reshape(groups, self.num_kv, -1, last)

    def _unflat(self, x_GKSD: torch.Tensor) -> torch.Tensor:
        """Inverse of `_flat`."""
        responses, heads, length, _ = self.q_NHRD.shape
        groups, last = self.rows.num_groups, x_GKSD.shape[-1]
        x_GKNSD = x_GKSD.reshape(groups, self.num_kv, -1, self.repeat * length, last)
        return x_GKNSD.transpose(1, 2).reshape(responses, heads, length, last)

    def forward(self, out_tHD: torch.Tensor, lse_tH: torch.Tensor) -> None:
        """Fill the group's slices of the output and of the log-sum-exp."""
        k_GKPD, v_GKPD = self.prefix.k_GKPD, self.prefix.v_GKPD
        out_p, lse_p = attend(self._flat(self.q_NHRD), k_GKPD, v_GKPD, causal=False, scaling=self.scaling)
        out_s, lse_s = attend(self.q_NHRD, self.k_NHRD, self.v_NHRD, causal=True, scaling=self.scaling)
        lse_p = self._unflat(lse_p.unsqueeze(-1))
        lse_s = lse_s.unsqueeze(-1)
        lse = torch.logaddexp(lse_p, lse_s)
        out = self._unflat(out_p) * (lse_p - lse).exp() + out_s * (lse_s - lse).exp()
        out_tHD.copy_(self.rows.unpad(out))
        lse_tH.copy_(self.rows.unpad(lse).squeeze(-1))

    def backward(
        self, grad_tHD: torch.Tensor, out_tHD: torch.Tensor, lse_tH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the group's packed q, k, v; the prefix's are added to its accumulators."""
        grad, out = self.rows.pad(grad_tHD), self.rows.pad(out_tHD)
        lse = self.rows.pad(lse_tH.unsqueeze(-1))
        k_GKPD, v_GKPD = self.prefix.k_GKPD, self.prefix.v_GKPD
        flat = [self._flat(x) for x in (grad, self.q_NHRD, out, lse)]
        to_prefix = attend_backward(
            flat[0], flat[1], k_GKPD, v_GKPD, flat[2], flat[3].squeeze(-1), causal=False, scaling=self.scaling
        )
        to_suffix = attend_backward(
            grad, self.q_NHRD, self.k_NHRD, self.v_NHRD, out, lse.squeeze(-1), causal=True, scaling=self.scaling
        )
        if self.prefix.grad_k_GKPD is not None and self.prefix.grad_v_GKPD is not None:
            self.prefix.grad_k_GKPD.add_(to_prefix[1])
            self.prefix.grad_v_GKPD.add_(to_prefix[2])
        grad_q = self._unflat(to_prefix[0]) + to_suffix[0]
        grad_k, grad_v = (g.unflatten(1, (self.num_kv, self.repeat)).sum(2) for g in to_suffix[1:])
        return self.rows.unpad(grad_q), self.rows.unpad(grad_k), self.rows.unpad(grad_v)
