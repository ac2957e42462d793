"""Which decoders a decode step can read, and what is said of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from numerics.cases import tiny_rig
from rollplex.config import LoraConfig
from rollplex.errors import ModelError
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.models.ranks import ALONE
from rollplex.rollout.decoder_weights import decoder_weights
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine


class OtherLinear(nn.Linear):
    """Whatever a user's own layer does."""


def _other_activation(layers: Any) -> None:
    layers[1].mlp.act_fn = nn.GELU()


def _other_linear(layers: Any) -> None:
    layers[0].self_attn.o_proj = OtherLinear(64, 64, bias=False)


def _other_query(layers: Any) -> None:
    layers[0].self_attn.q_proj = OtherLinear(64, 64)


def _other_epsilon(layers: Any) -> None:
    layers[1].input_layernorm.variance_epsilon = 1e-3


def _other_norm(layers: Any) -> None:
    layers[1].post_attention_layernorm = nn.LayerNorm(64)


def _no_norm(layers: Any) -> None:
    layers[0].input_layernorm = nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_activation, "the MLP of decoder layer 1 has the activation GELU"),
        (_other_linear, "o_proj of decoder layer 0 is a OtherLinear"),
        (_other_query, "q_proj of decoder layer 0 is a OtherLinear"),
        (_no_norm, "a norm of the decoder is a Identity without variance_epsilon"),
        (_other_norm, "a norm of the decoder is a LayerNorm without variance_epsilon"),
        (_other_epsilon, "norms have the epsilons [1e-05, 0.001]"),
    ],
)
def test_what_a_step_cannot_read_is_named(change: Callable[[Any], None], message: str) -> None:
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    change(made.policy.adapter.layers)
    before = [parameter.data_ptr() for parameter in made.policy.model.parameters()]
    with pytest.raises(ModelError, match=re.escape(message)):
        LocalEngine(made.policy, SamplingParams(num_generations=1, max_tokens=1), max_rows=1)
    assert [parameter.data_ptr() for parameter in made.policy.model.parameters()] == before  # nothing was fused


def _adapted(*targets: str) -> Any:
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    return add_lora(made.loaded.model, LoraConfig(r=4, target_modules=targets), seed=0, base_path=None)


def test_adapters_are_read_in_place() -> None:
    model = _adapted("q_proj", "down_proj")
    layer = decoder_weights(Policy(model).adapter).layers[1]
    module = model.get_base_model().model.language_model.layers[1].self_attn.q_proj
    query, key, value = layer.qkv
    assert query.adapter is not None and key.adapter is None and value.adapter is None
    assert query.adapter.down_CR.data_ptr() == module.lora_A["default"].weight.data_ptr()
    assert query.adapter.up_RX.data_ptr() == module.lora_B["default"].weight.data_ptr()
    assert query.adapter.scaling == module.scaling["default"]
    assert query.matrix_CX.data_ptr() == module.base_layer.weight.data_ptr()
    assert layer.down.adapter is not None and layer.output.adapter is None and len(layer.gate_up) == 1


def test_an_embedding_of_another_kind_is_refused() -> None:
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=1)
    made.policy.adapter.embed = nn.Sequential(made.policy.adapter.embed)
    with pytest.raises(ModelError, match="the embedding is a Sequential"):
        decoder_weights(made.policy.adapter)


def _adapted_by(**options: Any) -> Any:
    """A model with an adapter that peft makes and rollplex does not."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], exclude_modules=r".*visual.*", **options)
    return peft.get_peft_model(made.loaded.model, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "is LoRA of the kind DoraLinearVariant"),
        ({"lora_bias": True}, "is LoRA with biases"),
    ],
)
def test_adapters_that_a_step_would_get_wrong_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"q_proj of decoder layer 0 {message}"):
        decoder_weights(Policy(_adapted_by(**options)).adapter)


def test_other_tuners_are_refused() -> None:
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], exclude_modules=r".*visual.*")
    with pytest.raises(ModelError, match=r"q_proj of decoder layer 0 is a peft\.tuners\.ia3"):
        decoder_weights(Policy(peft.get_peft_model(made.loaded.model, config)).adapter)


def test_merged_adapters_are_refused() -> None:
    model = _adapted("q_proj")
    model.merge_adapter()
    with pytest.raises(ModelError, match="q_proj of decoder layer 0 is merged into its base layer"):
        decoder_weights(Policy(model).adapter)


def test_two_adapters_at_once_are_refused() -> None:
    model = _adapted("q_proj")
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ModelError, match="q_proj of decoder layer 0 is adapted by default, second at once"):
        decoder_weights(Policy(model).adapter)


def test_adapters_that_are_switched_off_change_nothing() -> None:
    model = _adapted("q_proj")
    with model.disable_adapter():
        assert decoder_weights(Policy(model).adapter).layers[0].qkv[0].adapter is None


class TwoRanks(type(ALONE)):  # type: ignore[misc]
    """The first of two ranks."""

    size = 2


def test_ranks_may_not_add_a_bias_or_an_adapter_twice() -> None:
    for change, message in (("bias", "o_proj of decoder layer 1 has a bias"), ("lora", "layer 0 has a LoRA adapter")):
        policy = Policy(_adapted("down_proj")) if change == "lora" else tiny_rig("qwen3_vl", num_layers=2).policy
        if change == "bias":
            output = policy.adapter.layers[1].self_attn.o_proj
            output.bias = nn.Parameter(torch.zeros(output.out_features, dtype=output.weight.dtype))
        policy.adapter.ranks = TwoRanks()
        with pytest.raises(ModelError, match=f"{message}, which every tensor-parallel rank would add"):
            decoder_weights(policy.adapter)
