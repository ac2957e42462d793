"""Fused projection weights: one storage, no second copy, still the model's own parameters."""

from __future__ import annotations

import copy

import pytest
import torch

from numerics.cases import FAMILIES, tiny_rig
from rollplex.config import LoraConfig, SharingConfig, TrainConfig
from rollplex.models.fused import fuse_layer
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.models.shard_plan import shard_plan
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.weights.bind import bound, shape_of_model
from rollplex.weights.layout import plan_sharing
from rollplex.weights.share import Backing, Side


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


def test_weights_fused_in_inference_mode_can_be_trained():
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=1)
    layer = made.policy.adapter.layers[0]
    with torch.inference_mode():
        fuse_layer(layer)
    (layer.self_attn.q_proj(torch.ones(2, 64)) ** 2).sum().backward()
    assert layer.self_attn.q_proj.weight.grad is not None


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


@pytest.mark.parametrize("layout", ["hf", "vllm"])
def test_views_of_a_backing_stay_where_they_are(layout):
    """Biases of 64 and 32 elements are apart in a backing that holds each matrix apart: then q, k, v are not fused."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=1, num_heads=4, num_kv_heads=2)
    with torch.no_grad():
        for parameter in made.loaded.model.parameters():
            parameter.add_(0.01)  # biases are drawn as 0
    plan = plan_sharing(
        shard_plan(shape_of_model(made.loaded.model)), SharingConfig(train_tp=2, rollout_tp=1, rollout_layout=layout)
    )
    backing = Backing.create(plan, 0, torch.float32, torch.device("cpu"))
    backing.load(dict(made.loaded.model.named_parameters()), "test")
    policy = Policy(bound(made.loaded.model, backing.tensors(Side.ROLLOUT), trainable=False))
    before = [p.data_ptr() for p in policy.model.parameters()]
    fused = fuse_layer(policy.adapter.layers[0])
    assert [p.data_ptr() for p in policy.model.parameters()] == before
    assert (fused.qkv_weight is None, fused.qkv_bias is None) == (layout == "hf", layout == "hf")
    params = SamplingParams(num_generations=3, max_tokens=5)
    found = []
    for each in (policy, made.policy):
        engine, done = LocalEngine(each, params, max_rows=8), []
        engine.admit(0, made.specs(["image"])[0])
        while engine.busy:
            done += [(f.response.index, f.response.token_ids) for f in engine.step()]
        found.append(sorted(done))
    assert found[0] == found[1]
