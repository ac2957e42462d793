"""Sizes of a mixture of experts from its config.json: as transformers has them, and what is not counted refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3VLMoeConfig

from rollplex.errors import ModelError
from rollplex.models.shapes import Experts, shape_from_hf
from rollplex.planner.flops import ModelCounts

SIZES: dict[str, Any] = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                         "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                         "moe_intermediate_size": 768}  # fmt: skip


@pytest.mark.parametrize("text", [{}, SIZES])
def test_as_transformers_reads_it(text: dict[str, Any]) -> None:
    """What transformers writes, with its defaults in it, says the same as the few numbers that it was made from."""
    few = {"model_type": "qwen3_vl_moe", "text_config": text, "tie_word_embeddings": False}
    written = Qwen3VLMoeConfig(text_config=text, tie_word_embeddings=False).to_dict()
    assert shape_from_hf(written, "written") == shape_from_hf(few, "few")


def test_30b_a3b() -> None:
    shape = shape_from_hf({"model_type": "qwen3_vl_moe", "text_config": SIZES}, "test")
    assert (shape.text.experts, shape.text.intermediate_size, shape.text.head_dim) == (Experts(128, 8), 768, 128)
    counts = ModelCounts(shape, 2, shape.text.experts)
    assert counts.text_parameters == pytest.approx(30.53e9, rel=1e-3)  # its name says 30B
    assert counts.expert_parameters == 48 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp_only_layers": [0]}, "experts in every layer"),
        ({"decoder_sparse_step": 2}, "experts in every layer"),
        ({"num_experts_per_tok": 200}, "200 of 128 experts"),
        ({"num_experts": "many"}, "num_experts 'many'"),
    ],
)
def test_what_is_not_counted_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        shape_from_hf({"model_type": "qwen3_vl_moe", "text_config": {**SIZES, **change}}, "test")
