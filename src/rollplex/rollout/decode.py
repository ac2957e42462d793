"""One decode step on packed rows: lean forward, prompt caches per group, suffix caches per row.

Shape letters: B live rows, G live groups, N most rows of a group, H/K/E query heads, key/value heads, their ratio,
D head dim, P longest prompt, R longest suffix so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rollplex.models.fused import FusedLayer, fuse_layer
from rollplex.models.norms import rms_norm
from rollplex.models.policy import Policy
from rollplex.models.prefix import PrefixPack
from rollplex.models.rotary import turn
from rollplex.models.steady import missing_rows
from rollplex.rollout.decode_buckets import table, widest
from rollplex.rollout.two_level import Grid, Places, attend, bias_where

# Suffix caches grow by this many tokens at a time, so that short responses do not pay for max_completion_length.
SUFFIX_BLOCK = 64


class Caches(Protocol):
    """Keys and values that a decode step reads, and where it stores those of its own tokens."""

    def attend(self, layer: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
        """Store this token's keys and values; (B, H * D) attention over each row's prompt and suffix, it included."""


class DecodeModel:
    """The policy's decoder as a lean one-token forward. Reads the training weights in place."""

    def __init__(self, policy: Policy):
        self.policy, self.adapter, self.shape = policy, policy.adapter, policy.adapter.shape
        self.ranks = policy.adapter.ranks
        self.fused: list[FusedLayer] = [fuse_layer(layer) for layer in self.adapter.layers]
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

    def forward(self, tokens_B: torch.Tensor, prompts: PromptCache, suffix: SuffixCache) -> torch.Tensor:
        """Feed one token per row; (B, V) logits of the next one."""
        suffix.begin_token()
        logits_BV = self.next_logits(tokens_B, suffix.positions_B, _GrownCaches(prompts, suffix))
        suffix.end_token()
        return logits_BV

    def next_logits(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, caches: Caches) -> torch.Tensor:
        """(B, V) logits behind these tokens at these positions; nothing here waits for the device."""
        shape, rows = self.shape, tokens_B.shape[0]
        missing = missing_rows(rows, self.cos_M1D)  # added to all products; attention goes without
        if missing:
            tokens_B, positions_B = (F.pad(x_B, (0, missing)) for x_B in (tokens_B, positions_B))
        x_BC = self.adapter.embed(tokens_B)
        cos_B1D = self.cos_M1D.index_select(0, positions_B)
        sin_B1D = self.sin_M1D.index_select(0, positions_B)
        heads = [shape.num_heads, shape.num_kv_heads]
        for number, (layer, fused) in enumerate(zip(self.adapter.layers, self.fused, strict=True)):
            qk_BJD, v_BKD = self._projections(layer, fused, rms_norm(layer.input_layernorm, x_BC))
            qk_BJD = turn(qk_BJD, cos_B1D, sin_B1D)
            if missing:
                qk_BJD, v_BKD = qk_BJD[:rows], v_BKD[:rows]
            q_BHD, k_BKD = qk_BJD.split_with_sizes(heads, dim=1)
            mixed_BC = caches.attend(number, q_BHD, k_BKD, v_BKD)
            if missing:
                mixed_BC = F.pad(mixed_BC, (0, 0, 0, missing))
            x_BC = self._add_linear(x_BC, mixed_BC, layer.self_attn.o_proj)
            x_BC = self._add_mlp(x_BC, layer, fused)
        return self.logits(x_BC)[:rows]

    def _projections(self, layer: Any, fused: FusedLayer, h_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k side by side (B, H + K, D), after q/k norm, and v (B, K, D)."""
        attention, shape = layer.self_attn, self.shape
        if fused.qkv_weight is not None:
            qkv_BC = F.linear(h_BC, fused.qkv_weight, fused.qkv_bias)
        else:
            qkv_BC = torch.cat([m(h_BC) for m in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=-1)
        qkv_BJD = qkv_BC.view(qkv_BC.shape[0], -1, shape.head_dim)
        num_qk = shape.num_heads + shape.num_kv_heads
        qk_BJD, v_BKD = qkv_BJD.split_with_sizes([num_qk, shape.num_kv_heads], dim=1)
        if self.has_qk_norm:
            q_BHD = rms_norm(attention.q_norm, qk_BJD[:, : shape.num_heads])
            k_BKD = rms_norm(attention.k_norm, qk_BJD[:, shape.num_heads :])
            qk_BJD = torch.cat((q_BHD, k_BKD), dim=1)
        return qk_BJD, v_BKD

    def _add_mlp(self, x_BC: torch.Tensor, layer: Any, fused: FusedLayer) -> torch.Tensor:
        mlp, h_BC = layer.mlp, rms_norm(layer.post_attention_layernorm, x_BC)
        if fused.gate_up_weight is None:
            return x_BC + self.ranks.total(mlp(h_BC))
        gate_BI, up_BI = F.linear(h_BC, fused.gate_up_weight).chunk(2, dim=-1)
        return self._add_linear(x_BC, mlp.act_fn(gate_BI).mul_(up_BI), mlp.down_proj)

    def _add_linear(self, x_BC: torch.Tensor, h_BI: torch.Tensor, module: Any) -> torch.Tensor:
        """x + module(h) summed over ranks; in one kernel where this rank has a whole, plain matrix."""
        if self.ranks.size > 1:
            return x_BC + self.ranks.total(module(h_BI))
        if type(module) is nn.Linear and module.bias is None:
            return torch.addmm(x_BC, h_BI, module.weight.T)
        return x_BC + module(h_BI)


class PromptCache:
    """Keys and values of live prompts, stacked over groups, each held once and read once per step for its group."""

    def __init__(self, model: DecodeModel):
        self.shape, self.device, self.root_scaling = model.shape, model.policy.device, model.root_scaling
        self.parts: dict[int, tuple[PrefixPack, int]] = {}
        self.stale = True
        self.keys: list[torch.Tensor] = []  # per layer (G, K, D, P)
        self.values: list[torch.Tensor] = []  # per layer (G, K, P, D)
        self.bias_G1P: torch.Tensor | None = None  # -inf behind shorter prompts; None: equal lengths
        self.grid = Grid(0, 0)

    def __contains__(self, rollout_id: int) -> bool:
        return rollout_id in self.parts

    def add(self, rollout_id: int, pack: PrefixPack, number: int) -> None:
        """A prompt becomes live."""
        self.parts[rollout_id] = (pack, number)
        self.stale = True

    def remove(self, rollout_id: int) -> None:
        """The prompt's last response ended."""
        del self.parts[rollout_id]
        self.stale = True

    def assign(self, owners: list[int]) -> None:
        """Which group each live row belongs to; restacks keys and values when the set of groups changed."""
        if not owners:
            return
        if self.stale:
            self._stack()
        slot_of = {rollout_id: slot for slot, rollout_id in enumerate(self.parts)}
        slots = [slot_of[owner] for owner in owners]
        width = widest(slots)
        rows, cells = table(slots, len(slot_of), width)
        if rows == list(range(len(owners))):
            self.grid = Grid(len(slot_of), width)
        else:
            on_device = (torch.tensor(numbers, device=self.device) for numbers in (rows, cells))
            self.grid = Grid(len(slot_of), width, *on_device)

    def places(self, layer: int) -> Places:
        """Of one layer, all scaled already."""
        return Places(self.keys[layer], self.values[layer], self.bias_G1P)

    def _stack(self) -> None:
        """In few calls (models/norms.py), with one layer's keys or values twice at most."""
        rows = [pack.rows(number) for pack, number in self.parts.values()]
        lengths = [part.stop - part.start for part in rows]
        longest = max(lengths)
        self.keys, self.values = [], []
        for layer in range(self.shape.num_layers):
            keys = [pack.keys[layer][part] for (pack, _), part in zip(self.parts.values(), rows, strict=True)]
            scaled = keys[0].new_empty(len(rows), self.shape.num_kv_heads, self.shape.head_dim, longest)
            padded = pad_sequence(keys, batch_first=True).permute(0, 2, 3, 1)
            self.keys.append(torch.mul(padded, self.root_scaling, out=scaled))
            del padded
            values = [pack.values[layer][part] for (pack, _), part in zip(self.parts.values(), rows, strict=True)]
            self.values.append(pad_sequence(values, batch_first=True).transpose(1, 2).contiguous())
        self.bias_G1P = None
        if min(lengths) < longest:
            behind = torch.arange(longest, device=self.device) >= torch.tensor(lengths, device=self.device)[:, None]
            self.bias_G1P = bias_where(behind, self.keys[0].dtype)
        self.stale = False


class SuffixCache:
    """Keys and values of generated tokens, one row per live response."""

    def __init__(self, model: DecodeModel, max_tokens: int):
        self.model, self.max_tokens = model, max_tokens
        self.num_rows = 0
        self.lengths: list[int] = []  # tokens fed so far, per row
        self.first: list[int] = []  # position of the first response token, per row
        self.keys: list[torch.Tensor] = []  # per layer (rows, K, capacity, D)
        self.values: list[torch.Tensor] = []
        self.positions_B = torch.empty(0, dtype=torch.long)
        self.bias_BR: torch.Tensor | None = None
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def grow_rows(self, num_rows: int, first_positions: list[int]) -> None:
        """Room for `num_rows` rows; the new ones are empty."""
        self.first.extend(first_positions)
        self.lengths.extend([0] * len(first_positions))
        self.num_rows = num_rows
        self.model.ensure_positions(max(self.first) + self.max_tokens)
        capacity = self.keys[0].shape[2] if self.keys else 0
        if not self.keys or self.keys[0].shape[0] < num_rows:
            self._resize(num_rows, max(capacity, min(SUFFIX_BLOCK, self.max_tokens)))

    def drop_row(self, slot: int) -> None:
        """Row `slot` ended; the last row takes its place."""
        last = self.num_rows - 1
        if slot != last:
            for tensors in (self.keys, self.values):
                for tensor in tensors:
                    tensor[slot].copy_(tensor[last])
            self.lengths[slot], self.first[slot] = self.lengths[last], self.first[last]
        self.lengths.pop()
        self.first.pop()
        self.num_rows = last

    def begin_token(self) -> None:
        """Fix where this step's keys and values go and which of them each row may see."""
        device = self.model.policy.device
        used = max(self.lengths) + 1
        if used > self.keys[0].shape[2]:
            capacity = self.keys[0].shape[2]
            self._resize(self.keys[0].shape[0], min(self.max_tokens, max(2 * capacity, used)))
        positions = [first + length for first, length in zip(self.first, self.lengths, strict=True)]
        self.positions_B = torch.tensor(positions, device=device)
        self.used = used
        if min(self.lengths) + 1 == used:
            self._places, self.bias_BR = None, None
            return
        lengths_B = torch.tensor(self.lengths, device=device)
        self._places = (torch.arange(self.num_rows, device=device), lengths_B)
        hidden = torch.arange(used, device=device) > lengths_B[:, None]
        self.bias_BR = bias_where(hidden, self.keys[0].dtype)

    def write(self, layer: int, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this token's keys and values; all of the rows' (B, K, R, D) so far."""
        keys, values = self.keys[layer], self.values[layer]
        if self._places is None:
            keys[: self.num_rows, :, self.used - 1] = k_BKD
            values[: self.num_rows, :, self.used - 1] = v_BKD
        else:
            rows, places = self._places
            keys[rows, :, places] = k_BKD
            values[rows, :, places] = v_BKD
        return keys[: self.num_rows, :, : self.used], values[: self.num_rows, :, : self.used]

    def end_token(self) -> None:
        """This step's token now counts."""
        self.lengths = [length + 1 for length in self.lengths]

    def _resize(self, rows: int, capacity: int) -> None:
        shape = self.model.shape
        for tensors in (self.keys, self.values):
            for layer in range(shape.num_layers):
                # zeros, not empty: masked places must hold finite values, 0 * nan is nan
                fresh = torch.zeros(
                    rows,
                    shape.num_kv_heads,
                    capacity,
                    shape.head_dim,
                    dtype=self.model.policy.dtype,
                    device=self.model.policy.device,
                )
                if layer < len(tensors):
                    old = tensors[layer]
                    fresh[: old.shape[0], :, : old.shape[2]] = old
                    tensors[layer] = fresh
                else:
                    tensors.append(fresh)


@dataclass(frozen=True, slots=True)
class _GrownCaches:
    """Caches of exactly the size that is needed."""

    prompts: PromptCache
    suffix: SuffixCache

    def attend(self, layer: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
        keys, values = self.suffix.write(layer, k_BKD, v_BKD)
        suffix = Places(keys, values, self.suffix.bias_BR)
        return attend(q_BHD, self.prompts.places(layer), suffix, self.prompts.grid)


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


class GrownRows:
    """LiveRows in caches that are made anew when the set of prompts changes, and grow with the longest suffix."""

    def __init__(self, model: DecodeModel, max_tokens: int):
        self.model, self.prompts, self.suffix = model, PromptCache(model), SuffixCache(model, max_tokens)
        self.owners: list[int] = []
        self._moved = False  # rows belong to other cells than in the last step

    def join(self, rollout_id: int, pack: PrefixPack, number: int) -> None:
        if rollout_id not in self.prompts:
            self.prompts.add(rollout_id, pack, number)

    def leave(self, rollout_id: int) -> None:
        self.prompts.remove(rollout_id)

    def add(self, owners: Sequence[int], first_positions: Sequence[int]) -> None:
        self.owners.extend(owners)
        self.suffix.grow_rows(len(self.owners), list(first_positions))
        self._moved = True

    def drop(self, row: int) -> None:
        last = self.owners.pop()
        if row < len(self.owners):
            self.owners[row] = last
        self.suffix.drop_row(row)
        self._moved = True

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        if self._moved:
            self.prompts.assign(self.owners)
            self._moved = False
        return self.model.forward(torch.tensor(tokens, device=self.model.policy.device), self.prompts, self.suffix)
