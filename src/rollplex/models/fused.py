"""Fused projection weights for decoding, without a second copy.

q, k and v (and gate and up) of a layer become row ranges of one storage: the parameters stay what they were, as views,
so that optimizers update the fused matrix in place, and decoding reads it with one matrix product instead of three.
Projections that are not plain Linear modules (LoRA) are left alone and multiplied one by one; so are those whose
parameters are views of a backing (weights/share.py), unless they lie next to each other there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer's projections as decoding wants them; None where they are apart."""

    qkv_weight: torch.Tensor | None
    qkv_bias: torch.Tensor | None
    gate_up_weight: torch.Tensor | None


def fuse_layer(layer: Any) -> FusedLayer:
    """Fuse in place (idempotent and free when already fused)."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [mlp.gate_proj, mlp.up_proj]
    qkv_weight = qkv_bias = gate_up_weight = None
    if all(type(m) is nn.Linear for m in qkv):
        qkv_weight = _fuse([m.weight for m in qkv])
        if qkv[0].bias is not None:
            qkv_bias = _fuse([m.bias for m in qkv])
            qkv_weight = None if qkv_bias is None else qkv_weight
    if all(type(m) is nn.Linear and m.bias is None for m in gate_up):
        gate_up_weight = _fuse([m.weight for m in gate_up])
    return FusedLayer(qkv_weight, qkv_bias, gate_up_weight)


def mark_backed(parameter: nn.Parameter) -> None:
    """Say that `parameter` is a view which others write through: it must stay where it is."""
    parameter.backed = True  # type: ignore[attr-defined]


def _fuse(parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """One (sum of rows, ...) tensor of which the parameters are consecutive row ranges; None: they must not move."""
    rows = [p.shape[0] for p in parameters]
    first = parameters[0]
    if not _is_fused(parameters):
        if any(getattr(p, "backed", False) for p in parameters):
            return None
        with torch.inference_mode(False):  # parameters of inference could not be trained any more
            fused = torch.cat([p.detach() for p in parameters])
        for parameter, part in zip(parameters, fused.split(rows), strict=True):
            parameter.data = part
    shape = (sum(rows), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _is_fused(parameters: Sequence[nn.Parameter]) -> bool:
    expected = parameters[0].data_ptr()
    storage = parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != expected:
            return False
        if parameter.untyped_storage().data_ptr() != storage:
            return False
        expected += parameter.numel() * parameter.element_size()
    return True
