"""The policy's decoder as plain_step.py takes it: its own matrices and norms by address, nothing copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from rollplex.errors import ModelError
from rollplex.models.adapter import VlmAdapter
from rollplex.models.fused import fuse_layer
from rollplex.rollout.plain_step import LowRank, PlainLayer, PlainModel, Product, Sizes


def plain_model(adapter: VlmAdapter) -> PlainModel:
    """Weights as they are now, q, k and v (gate and up) of a layer fused where they can be.

    Raises ModelError for a module that a decode step cannot read.
    """
    modules = [adapter.final_norm, *(part for layer in adapter.layers for part in layer.modules())]
    epsilons = {float(module.variance_epsilon) for module in modules if hasattr(module, "variance_epsilon")}
    if len(epsilons) > 1:
        raise ModelError(f"the decoder's norms have the epsilons {sorted(epsilons)}; decoding needs one (model.path)")
    shape, layers = adapter.shape, [_layer(layer, number) for number, layer in enumerate(adapter.layers)]
    sizes = Sizes(
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        mlp_width=layers[0].down.matrix_CX.shape[0],
        epsilon=epsilons.pop(),
        is_alone=adapter.ranks.size == 1,
    )
    return PlainModel(sizes, layers, _weight(adapter.embed), _weight(adapter.final_norm), _weight(adapter.lm_head))


def _layer(layer: Any, number: int) -> PlainLayer:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation):
        raise ModelError(
            f"the MLP of decoder layer {number} has the activation {type(mlp.act_fn).__name__}; decoding knows SiLU "
            "alone (hidden_act in config.json, model.path)"
        )

    def products(part: Any, *names: str) -> list[Product]:
        return [_product(getattr(part, name), f"{name} of decoder layer {number}") for name in names]

    fused = fuse_layer(layer)
    if fused.qkv_weight is None:
        qkv = products(attention, "q_proj", "k_proj", "v_proj")
    else:
        qkv = [Product(fused.qkv_weight.T, fused.qkv_bias, None)]
    if fused.gate_up_weight is None:
        gate_up = products(mlp, "gate_proj", "up_proj")
    else:
        gate_up = [Product(fused.gate_up_weight.T, None, None)]
    has_head_norms = hasattr(attention, "q_norm")
    return PlainLayer(
        input_norm_C=_weight(layer.input_layernorm),
        qkv=qkv,
        q_norm_D=_weight(attention.q_norm) if has_head_norms else None,
        k_norm_D=_weight(attention.k_norm) if has_head_norms else None,
        output=products(attention, "o_proj")[0],
        mlp_norm_C=_weight(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=products(mlp, "down_proj")[0],
    )


def _product(module: Any, what: str) -> Product:
    """A plain linear layer, or peft's with one LoRA adapter (models/lora.py). `what` names it in errors."""
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear:
        raise ModelError(
            f"{what} is a {type(base).__name__}; decoding knows torch.nn.Linear, with a LoRA adapter or without "
            "(model.path, model.lora)"
        )
    return Product(_weight(base).T, None if base.bias is None else base.bias.detach(), _adapter(module, what))


def _adapter(module: Any, what: str) -> LowRank | None:
    active = [name for name in getattr(module, "active_adapters", ()) if name in module.lora_A]
    if not active or module.merged or module.disable_adapters:
        return None
    if len(active) > 1 or module.lora_variant:
        raise ModelError(
            f"{what} has the adapters {', '.join(active)} and the variants {sorted(module.lora_variant)}; decoding "
            "knows one LoRA adapter without a variant (model.lora)"
        )
    down, up = module.lora_A[active[0]], module.lora_B[active[0]]
    return LowRank(_weight(down).T, _weight(up).T, float(module.scaling[active[0]]))


def _weight(module: Any) -> torch.Tensor:
    return module.weight.detach()
