"""Which decoders a decode step can read, and what is said of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from numerics.cases import tiny_rig
from rollplex.config import LoraConfig
from rollplex.errors import ModelError
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.rollout.plain_model import plain_model


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_activation, "the MLP of decoder layer 1 has the activation GELU"),
        (_other_linear, "o_proj of decoder layer 0 is a OtherLinear"),
        (_other_query, "q_proj of decoder layer 0 is a OtherLinear"),
        (_other_epsilon, "norms have the epsilons [1e-05, 0.001]"),
    ],
)
def test_what_a_step_cannot_read_is_named(change: Callable[[Any], None], message: str) -> None:
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    change(made.policy.adapter.layers)
    with pytest.raises(ModelError, match=re.escape(message)):
        LocalEngine(made.policy, SamplingParams(num_generations=1, max_tokens=1), max_rows=1)


def _adapted(*targets: str) -> Any:
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    return add_lora(made.loaded.model, LoraConfig(r=4, target_modules=targets), seed=0, base_path=None)


def test_adapters_are_read_in_place() -> None:
    model = _adapted("q_proj", "down_proj")
    layer = plain_model(Policy(model).adapter).layers[1]
    module = model.get_base_model().model.language_model.layers[1].self_attn.q_proj
    query, key, value = layer.qkv
    assert query.adapter is not None and key.adapter is None and value.adapter is None
    assert query.adapter.down_CR.data_ptr() == module.lora_A["default"].weight.data_ptr()
    assert query.adapter.up_RX.data_ptr() == module.lora_B["default"].weight.data_ptr()
    assert query.adapter.scaling == module.scaling["default"]
    assert query.matrix_CX.data_ptr() == module.base_layer.weight.data_ptr()
    assert layer.down.adapter is not None and layer.output.adapter is None and len(layer.gate_up) == 1


def test_two_adapters_at_once_are_refused() -> None:
    model = _adapted("q_proj")
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ModelError, match="q_proj of decoder layer 0 has the adapters default, second"):
        plain_model(Policy(model).adapter)


def test_adapters_that_are_switched_off_change_nothing() -> None:
    model = _adapted("q_proj")
    with model.disable_adapter():
        assert plain_model(Policy(model).adapter).layers[0].qkv[0].adapter is None
