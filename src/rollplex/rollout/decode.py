"""One decode step on packed rows: the functions of plain_step.py over caches that others hold (grown_rows.py,
fixed_step.py).

Shape letters as in plain_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from rollplex.models.policy import Policy
from rollplex.models.precision import is_lifted
from rollplex.models.prefix import PrefixPack
from rollplex.models.steady import missing_rows
from rollplex.rollout import plain_step
from rollplex.rollout.plain_model import plain_model
from rollplex.rollout.two_level import LayerCaches, Sight
from rollplex.rollout.uninterrupted import uninterrupted


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values that a decode step reads and adds those of its own tokens to."""

    layers: list[LayerCaches]
    sight: Sight


class DecodeModel:
    """The policy's decoder as a lean one-token forward. Reads the training weights in place."""

    def __init__(self, policy: Policy):
        """Raises ModelError for a module that it cannot read."""
        self.policy, self.adapter, self.shape = policy, policy.adapter, policy.adapter.shape
        self.plain = plain_model(policy.adapter)
        self.root_scaling = self.shape.scaling**0.5
        self.cos_M1D = self.sin_M1D = torch.empty(0, 1, self.shape.head_dim, dtype=policy.dtype, device=policy.device)
        device = policy.device
        self._step, self._head = uninterrupted(plain_step.plain_step, device), uninterrupted(plain_step.head, device)
        self._begin = uninterrupted(plain_step.begin, device)
        self._attention, self._mlp = uninterrupted(plain_step.attention, device), uninterrupted(plain_step.mlp, device)

    def logits(self, hidden_BC: torch.Tensor) -> torch.Tensor:
        """(B, V) logits of hidden states before the final norm."""
        logits_BV = self._head(hidden_BC, self.plain, is_lifted())
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
        fed = plain_step.Fed(tokens_B, positions_B, self.cos_M1D, self.sin_M1D, caches.sight, is_lifted())
        if self.plain.sizes.is_alone:
            return self._step(self.plain, caches.layers, fed)
        rows = tokens_B.shape[0]
        x_BC = self.adapter.embed(F.pad(tokens_B, (0, missing_rows(rows, self.cos_M1D))))
        return self.logits(self._through_layers(x_BC, caches.layers, fed))[:rows]

    def _through_layers(self, x_BC: torch.Tensor, caches: Sequence[LayerCaches], fed: plain_step.Fed) -> torch.Tensor:
        """plain_step.through_layers with sums over the ranks that share the layers."""
        ranks, step = self.adapter.ranks, self._begin(x_BC, self.plain.sizes, fed)
        for layer, cache in zip(self.plain.layers, caches, strict=True):
            x_BC = x_BC + ranks.total(self._attention(x_BC, layer, cache, step))
            x_BC = x_BC + ranks.total(self._mlp(x_BC, layer, step))
        return x_BC


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
