"""What Rollplex needs from a model family, and the registry of families.

An adapter views a transformers model as pure functions: vision features from pixels, rotary tables from explicit
positions, one decoder layer split at its attention. No method mutates the model or reads state kept on its modules,
so a layer can be run again for activation checkpointing, and LoRA (which replaces linear modules) works unchanged.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from rollplex.errors import ModelError
from rollplex.models.ranks import ALONE, TensorRanks, VocabPart

if TYPE_CHECKING:
    from rollplex.types import PromptSpec

FAMILIES: dict[str, str] = {
    "qwen2_5_vl": "rollplex.models.qwen2_5_vl:Qwen25VlAdapter",
    "qwen3_vl": "rollplex.models.qwen3_vl:Qwen3VlAdapter",
}


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """Visual tokens of a pack of prompts, in the order of their placeholders.

    `embeds` goes into the input embeddings; `deepstack[i]` is added to the hidden states after decoder layer i.
    """

    embeds: torch.Tensor  # (V, C)
    deepstack: tuple[torch.Tensor, ...] = ()  # each (V, C)


@dataclass(frozen=True, slots=True)
class FullBatch:
    """Whole sequences (prompt and response), right-padded, with explicit positions."""

    embeds_BSC: torch.Tensor  # text embeddings, visual places not yet filled
    positions_3BS: torch.Tensor
    mask_BS: torch.Tensor  # 1 on real tokens
    visual_BS: torch.Tensor  # True where a visual token of the prompt goes
    vision: VisionFeatures | None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of the language model that attention and caches need: heads are those that this rank holds."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    scaling: float  # multiplies q.k


class VlmAdapter(Protocol):
    """One model family as pure functions on packed tokens (T rows, no batch axis)."""

    shape: DecoderShape
    layers: Sequence[Any]  # decoder layers; Any because nn.Module types every part as Tensor | Module
    final_norm: nn.Module
    embed: nn.Module
    lm_head: nn.Linear
    ranks: TensorRanks  # who shares the layers
    vocab_part: VocabPart  # rows of embedding and head that are here
    visual: nn.Module
    vision_token_ids: tuple[int, ...]  # never to be sampled

    def encode(self, specs: Sequence[PromptSpec], *, ordinary: bool = False) -> VisionFeatures | None:
        """Vision features of all media of `specs`, ordered by spec, then by placeholder; None when there are none.

        ordinary: through transformers' own tower, as `full_hidden` runs its decoder.
        """

    def rotary(self, positions_3T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_T1D, sin_T1D) for MRoPE positions (3, T). Rotated is x * cos + roll(x, D / 2) * sin: `sin` is negative
        in its first half."""

    def qkv(
        self, layer: nn.Module, x_TC: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input norm, projections, q/k norm where the family has it, and RoPE: (q_THD, k_TKD, v_TKD)."""

    def full_hidden(self, batch: FullBatch) -> torch.Tensor:
        """The ordinary full-sequence forward through transformers' own decoder: (B, S, C) after the final norm."""

    def kept_tensors(self) -> Iterable[torch.Tensor]:
        """What stays from pass to pass beside the model's parameters and buffers: held memory (run.memory_steps)."""

    def finish(self, layer: nn.Module, x_TC: torch.Tensor, attention_TC: torch.Tensor) -> torch.Tensor:
        """Output projection, residual and MLP: the layer's output (T, C)."""


def adapter_for(model: nn.Module, ranks: TensorRanks = ALONE) -> VlmAdapter:
    """The adapter of `model`'s family (also through a peft wrapper). Raises ModelError for a family without one.

    With several `ranks`, `model` holds the shards of this one (weights/bind.py).
    """
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    family = base.config.model_type
    if family not in FAMILIES:
        raise ModelError(
            f"model family {family!r} has no adapter; families with one: {', '.join(sorted(FAMILIES))} "
            "(model.path, or add one: docs/add-a-model.md)"
        )
    module_name, class_name = FAMILIES[family].split(":")
    return getattr(importlib.import_module(module_name), class_name)(base, ranks)
