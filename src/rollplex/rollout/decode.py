"""One decode step on packed rows: step_functions.py over caches that others hold (grown_rows.py, fixed_step.py).

Shape letters as in step_functions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from rollplex.models.adapter import VlmAdapter
from rollplex.models.policy import Policy
from rollplex.models.precision import is_lifted
from rollplex.models.prefix import PrefixPack
from rollplex.models.steady import missing_rows
from rollplex.rollout.decoder_weights import decoder_weights
from rollplex.rollout.step_functions import (
    DecoderWeights,
    Fed,
    attention_part,
    begin,
    head,
    mlp_part,
    step_logits,
)
from rollplex.rollout.two_level import LayerCaches, Sight
from rollplex.rollout.uninterrupted import held, uninterrupted


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values that a decode step reads and adds those of its own tokens to."""

    layers: list[LayerCaches]
    sight: Sight


class DecodeModel:
    """The policy's decoder as a lean one-token forward. Reads the training weights in place."""

    def __init__(self, policy: Policy):
        """Raises ModelError for a decoder that it cannot read (decoder_weights.py)."""
        self.policy, self.adapter, self.shape = policy, policy.adapter, policy.adapter.shape
        self.weights = decoder_weights(policy.adapter)
        self._held = held(self.weights)
        self.root_scaling = self.shape.scaling**0.5
        self.cos_M1D = self.sin_M1D = torch.empty(0, 1, self.shape.head_dim, dtype=policy.dtype, device=policy.device)
        self._head = uninterrupted(head, policy.device)
        is_alone = policy.adapter.ranks.size == 1
        self.step = uninterrupted(step_logits, policy.device) if is_alone else RanksStep(policy.adapter, policy.device)

    def logits(self, hidden_BC: torch.Tensor) -> torch.Tensor:
        """(B, V) logits of hidden states before the final norm."""
        logits_BV = self._head(hidden_BC, self.weights, is_lifted())
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
        fed = Fed(tokens_B, positions_B, self.cos_M1D, self.sin_M1D, caches.sight, is_lifted())
        return self.step(self.weights, caches.layers, fed)


class RanksStep:
    """step_functions.step_logits for ranks that share the layers: sums over them between the parts of a layer."""

    def __init__(self, adapter: VlmAdapter, device: torch.device):
        self.adapter = adapter
        self._begin, self._head = uninterrupted(begin, device), uninterrupted(head, device)
        self._attention, self._mlp = uninterrupted(attention_part, device), uninterrupted(mlp_part, device)

    def __call__(self, weights: DecoderWeights, caches: list[LayerCaches], fed: Fed) -> torch.Tensor:
        """(B, V), whole on every rank."""
        rows, adapter = fed.tokens_B.shape[0], self.adapter
        x_BC = adapter.embed(F.pad(fed.tokens_B, (0, missing_rows(rows, weights.head_VC))))
        step = self._begin(x_BC, weights.sizes, fed)
        for layer, cache in zip(weights.layers, caches, strict=True):
            x_BC = x_BC + adapter.ranks.total(self._attention(x_BC, layer, cache, step))
            x_BC = x_BC + adapter.ranks.total(self._mlp(x_BC, layer, step))
        del step  # its scores may be larger than logits
        logits_BV = self._head(x_BC, weights, fed.lifted)[:rows]
        return adapter.vocab_part.whole(logits_BV, adapter.shape.vocab_size)


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
