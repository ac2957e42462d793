"""Sizes of published models as their config.json gives them, as far as plans read it."""

from __future__ import annotations

from typing import Any

QWEN_32B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 5120},
}
