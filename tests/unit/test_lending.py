"""Which layers of an engine are views of training's storage: decided on shapes, carried out on small arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from numerics.cases import tiny_rig
from rollplex.config import LoraConfig
from rollplex.models.fused import fuse_layer
from rollplex.models.lora import add_lora
from rollplex.models.shapes import shape_from_hf
from rollplex.models.shard_plan import Kind, shard_plan
from rollplex.weights.conventions import Layout, piece
from rollplex.weights.layout import DeviceLayout, Placement, plan_sharing
from rollplex.weights.lending import WHOLE, EngineLayer, EngineSharing, EngineTensor, LoanTerms, Way, decide
from rollplex.weights.loan import LentWeights
from rollplex.weights.pieces import PADDING
from rollplex.weights.share import Side


def _layout(*, heads: int = 8, kv_heads: int = 2, vocab: int = 301, tied: bool = False, family: str = "qwen2_5_vl"):
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": 4, "vocab_size": vocab}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 2, "intermediate_size": 3, "num_heads": 1, "out_hidden_size": 16,
              "patch_size": 2, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    return plan_sharing(shard_plan(shape_from_hf(config, "test")), WHOLE).device(0)


def _terms(layout: DeviceLayout, **withheld: str) -> LoanTerms:
    return LoanTerms(layout, "float32", "cpu", withheld)


def _tensor(placement: Placement, rank: int, degree: int) -> EngineTensor:
    """A unit as vLLM's rank holds it, the vision tower whole."""
    unit, (placed,) = placement.unit, placement.rollout
    rows = piece(unit, Layout.VLLM, rank, degree, placed.parameter.length).length
    shape = (unit.cross, rows) if unit.dim else (rows, *unit.trailing)
    strides = np.empty(shape, np.int8).strides
    return EngineTensor(unit.name, tuple(m.name for m in unit.members), "float32", shape, strides)


def _layer(*tensors: EngineTensor, **changes: object) -> EngineLayer:
    return replace(EngineLayer("layer", "cpu", tensors), **changes)


def _named(layout: DeviceLayout, end: str) -> Placement:
    return next(p for p in layout.placements if p.unit.name.endswith(end))


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 130, 301]),
    st.booleans(),
    st.sampled_from(["qwen2_5_vl", "qwen3_vl"]),
)
def test_a_view_shows_what_the_rank_would_be_sent(degree, kv_heads, vocab, tied, family):
    layout = _layout(kv_heads=kv_heads, vocab=vocab, tied=tied, family=family)
    memory = np.full(layout.backing_numel, -1, np.int32)
    full = {}
    for placement in layout.placements:  # training's tensors, all numbers different
        for placed in placement.train:
            (run, *_) = placed.parameter.runs
            shape = next(m.shape for m in placement.unit.members if m.name == run.tensor)
            full[run.tensor] = np.arange(np.prod(shape)).reshape(shape) + 1000 * len(full)
            view = as_strided(memory[placed.view.offset :], placed.view.shape, [4 * s for s in placed.view.strides])
            view[: shape[0]] = full[run.tensor]
    ways = dict.fromkeys(Way, 0)
    for placement in layout.placements:
        for rank in range(degree):
            verdict = decide(_layer(_tensor(placement, rank, degree)), _terms(layout), rank=rank, degree=degree)
            ways[verdict.way] += 1
            for _, view in verdict.views:
                shown = as_strided(memory[view.offset :], view.shape, [4 * s for s in view.strides])
                placed = placement.rollout[0].parameter.length
                for run in piece(placement.unit, Layout.VLLM, rank, degree, placed).runs:
                    if run.tensor != PADDING:
                        rows = shown if placement.unit.dim else shown[run.at : run.at + run.length]
                        assert np.array_equal(rows, full[run.tensor][run.start : run.stop] if not placement.unit.dim
                                              else full[run.tensor])  # fmt: skip
            whole = placement.unit.kind in (Kind.REPLICATED, Kind.VISION, Kind.VOCAB)
            assert (verdict.way is Way.ALIASED) >= (degree == 1 or whole)
            assert bool(verdict.reason) == (verdict.way is Way.PUSHED)
    assert ways[Way.ALIASED] and bool(ways[Way.PUSHED]) == (degree > 1)


@pytest.mark.parametrize(
    ("end", "degree", "reason"),
    [
        ("qkv_proj.weight", 2, "one rank's rows of a fused weight are several blocks"),
        ("language_model.layers.0.mlp.gate_up_proj.weight", 2, "several blocks"),
        ("o_proj.weight", 2, "columns of a row-parallel weight"),
        ("layers.0.mlp.down_proj.weight", 4, "columns of a row-parallel weight"),
    ],
)
def test_what_a_rank_has_no_view_of_is_pushed(end, degree, reason):
    layout = _layout()
    placement = _named(layout, end)
    verdict = decide(_layer(_tensor(placement, 0, degree)), _terms(layout), rank=0, degree=degree)
    assert verdict.way is Way.PUSHED and reason in verdict.reason and not verdict.views


def test_reasons_name_what_was_found_and_the_option():
    layout = _layout()
    norm = _tensor(_named(layout, "language_model.norm.weight"), 0, 1)
    cases = {
        "captured graphs": _layer(norm, fixed="captured graphs"),
        "training's weights lie on cpu, the engine's on cuda:1": _layer(norm, device="cuda:1"),
        "training holds float32, the engine bfloat16 (rollout.vllm.engine_dtype)": _layer(
            replace(norm, dtype="bfloat16")
        ),
        "no block of tensors": _layer(replace(norm, sources=("model.language_model.q.weight", *norm.sources))),
        "no tensor": _layer(replace(norm, sources=())),
        "cuts or lays it out otherwise": _layer(replace(norm, shape=(8,))),
        "otherwise than training": _layer(replace(norm, strides=(2,))),
    }
    for reason, layer in cases.items():
        verdict = decide(layer, _terms(layout), rank=0, degree=1)
        assert verdict.way is Way.PUSHED and reason in verdict.reason, reason
    merged = decide(_layer(norm), _terms(layout, **{norm.name: "merged"}), rank=0, degree=1)
    assert (merged.way, merged.reason) == (Way.PUSHED, "merged")


def test_a_layer_is_taken_as_a_whole():
    """Engines load and pack a layer at once: a bias that could be a view goes with the weight that cannot."""
    layout = _layout()
    weight, bias = (_tensor(_named(layout, f"qkv_proj.{leaf}"), 0, 1) for leaf in ("weight", "bias"))
    packed = decide(_layer(weight, bias, packed=True), _terms(layout), rank=0, degree=1)
    assert packed.way is Way.PACKED and [name for name, _ in packed.views] == [weight.name, bias.name]
    layer = _layer(replace(weight, dtype="float16"), bias)
    pushed = decide(layer, _terms(layout), rank=0, degree=1)
    assert pushed.way is Way.PUSHED
    sharing = EngineSharing(((packed, pushed), (packed,)))
    assert sharing.nbytes(Way.PACKED) == 2 * (weight.nbytes + bias.nbytes) and sharing.nbytes(Way.ALIASED) == 0
    assert sharing.pushed_sources == {*weight.sources, *bias.sources}
    assert list(sharing.reasons.values()) == [weight.nbytes // 2 + bias.nbytes]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_lent_parameters_keep_values_identity_and_place(family):
    rig = tiny_rig(family, torch.float32)
    model = rig.policy.model
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    lent = LentWeights(model)
    assert not lent.terms.withheld and lent.backing.version.readable
    store = next(iter(lent.backing.stores.values()))
    first, last = store.data_ptr(), store.data_ptr() + store.nbytes
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1]), name
        assert first <= parameter.data_ptr() < last
    where = {name: p.data_ptr() for name, p in model.named_parameters()}
    for layer in rig.policy.adapter.layers:
        fused = fuse_layer(layer)  # q, k, v and gate, up lie together already: nothing moves
        assert fused.qkv_weight is not None and fused.gate_up_weight is not None
    assert where == {name: p.data_ptr() for name, p in model.named_parameters()}
    layer = rig.policy.adapter.layers[0].self_attn
    with torch.no_grad():
        layer.k_proj.weight.fill_(7.0)
    packed = lent.backing.parameters(Side.ROLLOUT)["model.language_model.layers.0.self_attn.qkv_proj.weight"]
    rows = layer.q_proj.weight.shape[0]
    assert (packed[rows : rows + layer.k_proj.weight.shape[0]] == 7.0).all() and (packed[:rows] != 7.0).any()


def test_weights_with_adapters_are_withheld_and_stay():
    model = add_lora(
        tiny_rig("qwen2_5_vl", torch.float32).policy.model,
        LoraConfig(r=2, target_modules=("q_proj", "visual.qkv")),
        seed=0,
        base_path=None,
    )
    names = [name for name, p in model.named_parameters() if ".lora_" not in name and ".base_layer." in name]
    adapted = {name for name in names if name.endswith(".weight")}
    assert adapted
    where = {name: dict(model.named_parameters())[name].data_ptr() for name in adapted}
    lent = LentWeights(model)
    prefix = "base_model.model."
    assert set(lent.terms.withheld) == {name.removeprefix(prefix).replace(".base_layer.", ".") for name in adapted}
    assert all("model.lora" in reason for reason in lent.terms.withheld.values())
    assert where == {name: dict(model.named_parameters())[name].data_ptr() for name in adapted}
