"""Bytes of a model against the published arithmetic. Parameter lists are compared with real models elsewhere."""

from __future__ import annotations

from published_models import QWEN_32B
from rollplex.memory import model_bytes
from rollplex.models.shapes import ModelShape, shape_from_hf


def _shape() -> ModelShape:
    return shape_from_hf(QWEN_32B, "test")


def test_published_32b_arithmetic() -> None:
    """research/rl_systems.md 1 and 2.5."""
    shape = _shape()
    whole, eighth, quarter = (model_bytes.rank_parameters(shape, degree) for degree in (1, 8, 4))
    assert whole.text == 32_763_876_352
    assert round(100 * whole.qkv / whole.text, 2) == 7.17
    assert round(2 * eighth.text / 2**30, 2) == 7.63
    assert round(2 * quarter.text / 2**30, 2) == 15.26
    assert round(2 * quarter.qkv / 2**30, 3) == 1.094
    assert whole.vision == eighth.vision
    # Sixteen ranks and eight KV heads: k and v are held twice.
    assert model_bytes.rank_parameters(shape, 16).qkv > eighth.qkv // 2
    assert [model_bytes.kv_bytes_per_token(shape, 2, tp) for tp in (1, 4, 8)] == [256 << 10, 64 << 10, 32 << 10]
    # Not below one whole KV head a rank.
    assert model_bytes.kv_bytes_per_token(shape, 2, 16) == 32 << 10


def test_published_activation_sizes() -> None:
    sharded = model_bytes.Activations(_shape(), 2, 8, sequence_parallel=True)
    whole = model_bytes.Activations(_shape(), 2, 8, sequence_parallel=False)
    tokens = 8 * 8192
    assert 64 * sharded.layer_input(tokens) == 5 << 30
    assert 64 * whole.layer_input(tokens) == 40 << 30
    # The research note's estimate, from its own reading of what a layer saves, is 118 GiB.
    assert 110 < sharded.decoder(tokens, prefix=False) / 2**30 < 120
    assert sharded.decoder(tokens, prefix=True) < sharded.decoder(tokens, prefix=False)


def test_a_layer_by_hand() -> None:
    """One token, two ranks: 4H shared out by sequence, the rest by head and by MLP column."""
    act = model_bytes.Activations(_shape(), 2, 2, sequence_parallel=True)
    assert act.layer(1) == 2 * (4 * 5120 + 2 * 5120 + 2 * 1024 + 3 * 27648) // 2 + 4 * 40 // 2
