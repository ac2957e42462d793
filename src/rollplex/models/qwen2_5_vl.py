"""Qwen2.5-VL: windowed vision tower, text decoder with sectioned MRoPE, biases on q, k and v."""

from __future__ import annotations

from rollplex.models.decoder import QwenDecoder


class Qwen25VlAdapter(QwenDecoder):
    """Adapter of transformers' Qwen2_5_VLForConditionalGeneration."""

    has_qk_norm = False
