"""Fused projection weights: one storage, no second copy, still the model's own parameters."""

from __future__ import annotations

import copy

import pytest
import torch

from numerics.cases import FAMILIES, tiny_rig
from rollplex.config import LoraConfig, TrainConfig
from rollplex.models.fused import fuse_layer
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.train.optimizer import PolicyOptimizer


def _storage_bytes(model):
    return sum(
        s.nbytes() for s in {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}.values()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_keeps_values_names_and_bytes(family):
    made = tiny_rig(family, torch.float32, num_heads=4, num_kv_heads=2)
    before = copy.deepcopy(made.policy.model.state_dict())
    size = _storage_bytes(made.policy.model)
    for layer in made.policy.adapter.layers:
        fused, attention = fuse_layer(layer), layer.self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        assert torch.equal(fused.qkv_weight, torch.cat([m.weight for m in parts]))
        assert (fused.qkv_bias is None) == (family == "qwen3_vl")
        if fused.qkv_bias is not None:
            assert torch.equal(fused.qkv_bias, torch.cat([m.bias for m in parts]))
        assert torch.equal(fused.gate_up_weight, torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))
        again = fuse_layer(layer)
        assert again.qkv_weight.data_ptr() == fused.qkv_weight.data_ptr()
    after = made.policy.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()) and after.keys() == before.keys()
    assert _storage_bytes(made.policy.model) == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_step_moves_the_fused_matrix(dtype):
    made = tiny_rig("qwen2_5_vl", dtype, num_layers=1)
    layer = made.policy.adapter.layers[0]
    optimizer = PolicyOptimizer(made.policy.model, TrainConfig(learning_rate=0.1), 1)
    fused = fuse_layer(layer)
    before = fused.qkv_weight.clone()
    (made.policy.adapter.qkv(layer, torch.ones(2, 64, dtype=dtype), *_tables(made, dtype))[0] ** 2).sum().backward()
    optimizer.step()
    assert not torch.equal(fused.qkv_weight, before)
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    assert torch.equal(fused.qkv_weight, torch.cat([m.weight for m in parts]))


def _tables(made, dtype):
    return made.policy.adapter.rotary(torch.arange(2).expand(3, -1), dtype)


def test_a_copy_of_a_fused_model_is_independent():
    made = tiny_rig("qwen3_vl", torch.float32, num_layers=1)
    fused = fuse_layer(made.policy.adapter.layers[0])
    other = copy.deepcopy(made.policy.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert float(fused.qkv_weight.abs().sum()) > 0
    again = fuse_layer(Policy(other).adapter.layers[0])
    assert float(again.qkv_weight.abs().sum()) == 0


@pytest.mark.parametrize("targets", [("q_proj",), ("gate_proj",), ("o_proj",)])
def test_projections_with_adapters_are_left_alone(targets):
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=1)
    wrapped = add_lora(made.loaded.model, LoraConfig(r=2, target_modules=targets), seed=0, base_path=None)
    fused = fuse_layer(Policy(wrapped).adapter.layers[0])
    assert (fused.qkv_weight is None) == (targets == ("q_proj",))
    assert (fused.gate_up_weight is None) == (targets == ("gate_proj",))
