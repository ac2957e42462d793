"""One decode step on packed rows: a lean forward over caches that others hold (grown_rows.py, fixed_step.py).

Shape letters: B live rows, H/K query and key/value heads, J = H + K (with v: H + 2 K), D head dim, X = J * D,
A = H * D, C hidden width, I MLP width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from rollplex.models.adapter import DecoderShape
from rollplex.models.fused import fuse_layer
from rollplex.models.norms import rms_norm
from rollplex.models.policy import Policy
from rollplex.models.prefix import PrefixPack
from rollplex.models.rotary import turn
from rollplex.models.steady import missing_rows
from rollplex.rollout.two_level import Grid, LayerCaches, Seen, StepAttention


class Caches(Protocol):
    """Keys and values that a decode step reads, and where it stores those of its own tokens."""

    @property
    def prompt_seen(self) -> Seen:
        """Places of the rows' prompts."""

    @property
    def suffix_seen(self) -> Seen:
        """Places of the rows' suffixes, this step's token included."""

    @property
    def grid(self) -> Grid:
        """Which rows share a prompt."""

    def store(self, layer: int, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> LayerCaches:
        """Store this token's keys and values; all that the rows see in this layer."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer as a step reads it: matrices as products take them, None where modules must be called."""

    modules: Any
    input_norm: Any
    mlp_norm: Any
    qkv_CX: torch.Tensor | None
    qkv_bias: torch.Tensor | None
    gate_up_CI: torch.Tensor | None
    output_AC: torch.Tensor | None
    down_IC: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any, *, alone: bool) -> _Layer:
        """alone: no other ranks share the layer."""
        fused = fuse_layer(layer)
        return cls(
            modules=layer,
            input_norm=layer.input_layernorm,
            mlp_norm=layer.post_attention_layernorm,
            qkv_CX=None if fused.qkv_weight is None else fused.qkv_weight.T,
            qkv_bias=fused.qkv_bias,
            gate_up_CI=None if fused.gate_up_weight is None else fused.gate_up_weight.T,
            output_AC=_matrix(layer.self_attn.o_proj) if alone else None,
            down_IC=_matrix(layer.mlp.down_proj) if alone else None,
        )


def _matrix(module: Any) -> torch.Tensor | None:
    """Of a plain linear layer without a bias."""
    return module.weight.detach().T if type(module) is nn.Linear and module.bias is None else None


class _Buffers:
    """What all layers of one step write to, and its parts: a view costs as much as an operation (two_level.py)."""

    def __init__(self, like: torch.Tensor, shape: DecoderShape, width: int):
        """like: (rows, C). width: of gate and up together."""
        rows, heads, kv_heads = like.shape[0], shape.num_heads, shape.num_kv_heads
        self.qkv_BX = like.new_empty(rows, (heads + 2 * kv_heads) * shape.head_dim)
        qkv_BJD = self.qkv_BX.view(rows, -1, shape.head_dim)
        self.qk_BJD, self.v_BKD = qkv_BJD.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
        self.unturned = self.qk_BJD.split_with_sizes([heads, kv_heads], dim=1)
        self.turned_BJD = like.new_empty(self.qk_BJD.shape)
        self.q_BHD, self.k_BKD = self.turned_BJD.split_with_sizes([heads, kv_heads], dim=1)
        self.gate_up_BI = like.new_empty(rows, width)
        self.gate_BI, self.up_BI = self.gate_up_BI.chunk(2, dim=-1)
        self.activated_BI = like.new_empty(rows, width // 2)


class DecodeModel:
    """The policy's decoder as a lean one-token forward. Reads the training weights in place."""

    def __init__(self, policy: Policy):
        self.policy, self.adapter, self.shape = policy, policy.adapter, policy.adapter.shape
        self.ranks = policy.adapter.ranks
        self.layers = [_Layer.of(layer, alone=self.ranks.size == 1) for layer in self.adapter.layers]
        widths = [layer.gate_up_CI.shape[1] for layer in self.layers if layer.gate_up_CI is not None]
        self.mlp_width = max(widths, default=0)
        self.root_scaling = self.shape.scaling**0.5
        self.has_qk_norm = hasattr(self.adapter.layers[0].self_attn, "q_norm")
        self.cos_M1D = self.sin_M1D = torch.empty(0, 1, self.shape.head_dim, dtype=policy.dtype, device=policy.device)

    def logits(self, hidden_BC: torch.Tensor) -> torch.Tensor:
        """(B, V) logits of hidden states before the final norm."""
        rows = hidden_BC.shape[0]
        if missing := missing_rows(rows, hidden_BC):
            hidden_BC = F.pad(hidden_BC, (0, 0, 0, missing))
        logits_BV = F.linear(rms_norm(self.adapter.final_norm, hidden_BC), self.adapter.lm_head.weight)[:rows]
        return self.adapter.vocab_part.whole(logits_BV, self.shape.vocab_size)

    def ensure_positions(self, count: int) -> None:
        """Rotary tables for text positions [0, count): all three axes equal, as in every response."""
        if count > self.cos_M1D.shape[0]:
            positions = torch.arange(count, device=self.policy.device).expand(3, -1)
            cos, sin = self.adapter.rotary(positions, self.policy.dtype)
            # Queries and keys both carry the root of the score's scaling, so that no pass over scores or queries is
            # spent on it.
            self.cos_M1D, self.sin_M1D = cos * self.root_scaling, sin * self.root_scaling

    def next_logits(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, caches: Caches) -> torch.Tensor:
        """(B, V) logits behind these tokens at these positions; nothing here waits for the device."""
        rows = tokens_B.shape[0]
        missing = missing_rows(rows, self.cos_M1D)  # added to all products; attention goes without
        if missing:
            tokens_B, positions_B = (F.pad(x_B, (0, missing)) for x_B in (tokens_B, positions_B))
        x_BC = self.adapter.embed(tokens_B)
        cos_B1D = self.cos_M1D.index_select(0, positions_B)
        sin_B1D = self.sin_M1D.index_select(0, positions_B)
        buffers = _Buffers(x_BC, self.shape, self.mlp_width)
        q_BHD, k_BKD, v_BKD = buffers.q_BHD[:rows], buffers.k_BKD[:rows], buffers.v_BKD[:rows]
        attention = StepAttention(q_BHD, k_BKD.shape[1], caches.prompt_seen, caches.suffix_seen, caches.grid)
        for number, layer in enumerate(self.layers):
            self._project(layer, rms_norm(layer.input_norm, x_BC), buffers)
            turn(buffers.qk_BJD, cos_B1D, sin_B1D, out=buffers.turned_BJD)
            mixed_BA = attention(caches.store(number, k_BKD, v_BKD))
            if missing:
                mixed_BA = F.pad(mixed_BA, (0, 0, 0, missing))
            self._add_linear(x_BC, mixed_BA, layer.output_AC, layer.modules.self_attn.o_proj)
            self._add_mlp(x_BC, layer, buffers)
        del attention, mixed_BA, buffers, q_BHD, k_BKD, v_BKD  # scores may be larger than logits
        return self.logits(x_BC)[:rows]

    def _project(self, layer: _Layer, h_BC: torch.Tensor, buffers: _Buffers) -> None:
        """Fill q, k (both after their norms) and v."""
        attention = layer.modules.self_attn
        if layer.qkv_CX is None:
            modules = (attention.q_proj, attention.k_proj, attention.v_proj)
            torch.cat([module(h_BC) for module in modules], dim=-1, out=buffers.qkv_BX)
        elif layer.qkv_bias is None:
            torch.mm(h_BC, layer.qkv_CX, out=buffers.qkv_BX)
        else:
            torch.addmm(layer.qkv_bias, h_BC, layer.qkv_CX, out=buffers.qkv_BX)
        if self.has_qk_norm:
            for norm, x_BJD in zip((attention.q_norm, attention.k_norm), buffers.unturned, strict=True):
                x_BJD.copy_(rms_norm(norm, x_BJD))

    def _add_mlp(self, x_BC: torch.Tensor, layer: _Layer, buffers: _Buffers) -> None:
        mlp, h_BC = layer.modules.mlp, rms_norm(layer.mlp_norm, x_BC)
        if layer.gate_up_CI is None:
            x_BC.add_(self.ranks.total(mlp(h_BC)))
            return
        torch.mm(h_BC, layer.gate_up_CI, out=buffers.gate_up_BI)
        torch.mul(mlp.act_fn(buffers.gate_BI), buffers.up_BI, out=buffers.activated_BI)
        self._add_linear(x_BC, buffers.activated_BI, layer.down_IC, mlp.down_proj)

    def _add_linear(self, x_BC: torch.Tensor, h_BI: torch.Tensor, matrix_IC: torch.Tensor | None, module: Any) -> None:
        """x += module(h) summed over ranks; in one kernel where this rank has a whole, plain matrix."""
        if matrix_IC is not None:
            torch.addmm(x_BC, h_BI, matrix_IC, out=x_BC)
        else:
            x_BC.add_(self.ranks.total(module(h_BI)))


class LiveRows(Protocol):
    """Responses that decode together, as the engine numbers them: without gaps, the last takes the place of one that
    ends. Called under torch.inference_mode."""

    def join(self, rollout_id: int, pack: PrefixPack, number: int) -> None:
        """Prompt `number` of `pack` has rows from now on; nothing to do where it has some already."""

    def leave(self, rollout_id: int) -> None:
        """The prompt's last row ends, or has ended, before the next step."""

    def add(self, owners: Sequence[int], first_positions: Sequence[int]) -> None:
        """New rows behind the others: the rollout id and the first response token's position of each."""

    def drop(self, row: int) -> None:
        """A row ended; the last one takes its number."""

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed one token per row; (B, V) logits of the next one, to be read before the next call."""
