"""Qwen3-VL: deepstack vision features added after the first decoder layers, q/k norms, interleaved MRoPE."""

from __future__ import annotations

from rollplex.models.decoder import QwenDecoder


class Qwen3VlAdapter(QwenDecoder):
    """Adapter of transformers' Qwen3VLForConditionalGeneration."""

    has_qk_norm = True
