"""One decode step on packed rows over caches that others hold (grown_rows.py, fixed_step.py).

For a decoder of plain matrices on one rank it is one call (plain_step.py); of others (LoRA, tensor parallelism) the
modules are called layer by layer.

Shape letters as in plain_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from rollplex.models.adapter import VlmAdapter
from rollplex.models.fused import FusedLayer, fuse_layer
from rollplex.models.norms import rms_norm
from rollplex.models.policy import Policy
from rollplex.models.precision import is_lifted
from rollplex.models.prefix import PrefixPack
from rollplex.models.rotary import turn
from rollplex.models.steady import by_rows, missing_rows
from rollplex.rollout.plain_step import Fed, PlainLayer, PlainModel, plain_step
from rollplex.rollout.two_level import LayerCaches, Sight, attend, scratch_for, store
from rollplex.rollout.uninterrupted import uninterrupted


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values that a decode step reads and adds those of its own tokens to."""

    layers: list[LayerCaches]
    sight: Sight


class DecodeModel:
    """The policy's decoder as a lean one-token forward. Reads the training weights in place."""

    def __init__(self, policy: Policy):
        self.policy, self.adapter, self.shape = policy, policy.adapter, policy.adapter.shape
        self.ranks = policy.adapter.ranks
        self.fused = [fuse_layer(layer) for layer in self.adapter.layers]
        self.plain = _plain(policy.adapter, self.fused)
        self.root_scaling = self.shape.scaling**0.5
        self.cos_M1D = self.sin_M1D = torch.empty(0, 1, self.shape.head_dim, dtype=policy.dtype, device=policy.device)
        self._plain_step = uninterrupted(plain_step, policy.device)
        self._scratch_for = uninterrupted(scratch_for, policy.device)
        self._store, self._attend = uninterrupted(store, policy.device), uninterrupted(attend, policy.device)

    def logits(self, hidden_BC: torch.Tensor) -> torch.Tensor:
        """(B, V) logits of hidden states before the final norm."""
        adapter = self.adapter
        logits_BV = by_rows(
            lambda x_BC: F.linear(rms_norm(adapter.final_norm, x_BC), adapter.lm_head.weight), hidden_BC
        )
        return adapter.vocab_part.whole(logits_BV, self.shape.vocab_size)

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
        if self.plain is None:
            return self._called(tokens_B, positions_B, caches)
        fed = Fed(tokens_B, positions_B, self.cos_M1D, self.sin_M1D, caches.sight, is_lifted())
        return self._plain_step(self.plain, caches.layers, fed)

    def _called(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, caches: Caches) -> torch.Tensor:
        """Layer by layer, through its modules."""
        rows, shape = tokens_B.shape[0], self.shape
        missing = missing_rows(rows, self.cos_M1D)  # added to all products; attention goes without
        if missing:
            tokens_B, positions_B = (F.pad(x_B, (0, missing)) for x_B in (tokens_B, positions_B))
        x_BC = self.adapter.embed(tokens_B)
        cos_B1D, sin_B1D = self.cos_M1D.index_select(0, positions_B), self.sin_M1D.index_select(0, positions_B)
        q_BHD = x_BC.new_empty(rows, shape.num_heads, shape.head_dim)
        scratch = self._scratch_for(q_BHD, shape.num_kv_heads, caches.sight)
        for layer, fused, cache in zip(self.adapter.layers, self.fused, caches.layers, strict=True):
            qk_BJD, v_BKD = self._projected(layer, fused, rms_norm(layer.input_layernorm, x_BC))
            turned_BJD = turn(qk_BJD, cos_B1D, sin_B1D)
            q_BHD.copy_(turned_BJD[:rows, : shape.num_heads])
            self._store(turned_BJD[:rows, shape.num_heads :], v_BKD[:rows], cache, caches.sight)
            mixed_BA = self._attend(scratch, cache, caches.sight)
            if missing:
                mixed_BA = F.pad(mixed_BA, (0, 0, 0, missing))
            x_BC.add_(self.ranks.total(layer.self_attn.o_proj(mixed_BA)))
            x_BC.add_(self.ranks.total(self._mlp(layer, fused, rms_norm(layer.post_attention_layernorm, x_BC))))
        del scratch, mixed_BA  # scores may be larger than logits
        return self.logits(x_BC)[:rows]

    def _projected(self, layer: Any, fused: FusedLayer, h_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """((B, J, D) queries and keys, both after their norms, (B, K, D) values)."""
        attention, shape = layer.self_attn, self.shape
        if fused.qkv_weight is None:
            modules = (attention.q_proj, attention.k_proj, attention.v_proj)
            qkv_BX = torch.cat([module(h_BC) for module in modules], dim=-1)
        else:
            qkv_BX = F.linear(h_BC, fused.qkv_weight, fused.qkv_bias)
        heads = [shape.num_heads, shape.num_kv_heads]
        qk_BJD, v_BKD = qkv_BX.unflatten(1, (-1, shape.head_dim)).split_with_sizes([sum(heads), heads[1]], dim=1)
        if hasattr(attention, "q_norm"):
            q_BHD, k_BKD = qk_BJD.split_with_sizes(heads, dim=1)
            qk_BJD = torch.cat((rms_norm(attention.q_norm, q_BHD), rms_norm(attention.k_norm, k_BKD)), dim=1)
        return qk_BJD, v_BKD

    def _mlp(self, layer: Any, fused: FusedLayer, h_BC: torch.Tensor) -> torch.Tensor:
        if fused.gate_up_weight is None:
            return layer.mlp(h_BC)
        gate_BI, up_BI = F.linear(h_BC, fused.gate_up_weight).chunk(2, dim=-1)
        return layer.mlp.down_proj(layer.mlp.act_fn(gate_BI) * up_BI)


def _plain(adapter: VlmAdapter, fused: Sequence[FusedLayer]) -> PlainModel | None:
    """The decoder as plain_step.py takes it, None where modules must be called."""
    norms: list[Any] = [adapter.final_norm]
    matrices: list[Any] = [adapter.lm_head]
    for layer in adapter.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(layer)]
        matrices += [layer.self_attn.o_proj, layer.mlp.down_proj]
    epsilons = {float(norm.variance_epsilon) for norm in norms}
    if (
        adapter.ranks.size > 1
        or type(adapter.embed) is not nn.Embedding
        or not all(type(module) is nn.Linear and module.bias is None for module in matrices)
        or not all(isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation) for layer in adapter.layers)
        or len(epsilons) > 1
    ):
        return None
    layers = [_plain_layer(layer, weights) for layer, weights in zip(adapter.layers, fused, strict=True)]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers):
        return None
    return PlainModel(
        layers=known,
        embedding_VC=adapter.embed.weight.detach(),
        final_norm_C=norms[0].weight.detach(),
        head_VC=adapter.lm_head.weight.detach(),
        epsilon=epsilons.pop(),
        heads=adapter.shape.num_heads,
        kv_heads=adapter.shape.num_kv_heads,
        head_dim=adapter.shape.head_dim,
    )


def _plain_layer(layer: Any, fused: FusedLayer) -> PlainLayer | None:
    if fused.qkv_weight is None or fused.gate_up_weight is None:
        return None
    q_norm_D, k_norm_D = [norm.weight.detach() for norm in _head_norms(layer)] or (None, None)
    return PlainLayer(
        input_norm_C=layer.input_layernorm.weight.detach(),
        qkv_CX=fused.qkv_weight.T,
        qkv_bias_X=fused.qkv_bias,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        output_AC=layer.self_attn.o_proj.weight.detach().T,
        mlp_norm_C=layer.post_attention_layernorm.weight.detach(),
        gate_up_CI=fused.gate_up_weight.T,
        down_IC=layer.mlp.down_proj.weight.detach().T,
    )


def _head_norms(layer: Any) -> tuple[Any, ...]:
    """Norms of queries and keys, in families that have them."""
    attention = layer.self_attn
    return (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()


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
