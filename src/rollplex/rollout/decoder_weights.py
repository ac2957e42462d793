"""The policy's decoder as step_functions.py takes it: its own matrices and norms by address, nothing copied.

A step computes a layer by the formula of models/decoder.py, not by what its modules' `forward` says. So embeddings,
linear layers, adapters and activations of other kinds are refused by name, and norms without `variance_epsilon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from rollplex.errors import ModelError
from rollplex.models.adapter import VlmAdapter
from rollplex.models.fused import fuse_layer
from rollplex.models.ranks import VocabEmbedding
from rollplex.rollout.step_functions import DecoderWeights, LayerWeights, LowRank, Product, Sizes


def decoder_weights(adapter: VlmAdapter) -> DecoderWeights:
    """Weights where they are now, q, k and v (gate and up) of a layer fused where they can be.

    Raises ModelError for a module that a decode step cannot read, before anything is fused.
    """
    if type(adapter.embed) not in (nn.Embedding, VocabEmbedding):
        raise ModelError(
            f"the embedding is a {type(adapter.embed).__name__}; decoding knows torch.nn.Embedding alone (model.path)"
        )
    shape, epsilon = adapter.shape, _epsilon(adapter)
    layers = [_layer(layer, number) for number, layer in enumerate(adapter.layers)]
    if adapter.ranks.size > 1:
        _check_divisible(layers)
    layers = [_fused(weights, layer) for weights, layer in zip(layers, adapter.layers, strict=True)]
    mlp_width = layers[0].down.matrix_CX.shape[0]
    sizes = Sizes(shape.num_heads, shape.num_kv_heads, shape.head_dim, mlp_width, epsilon)
    return DecoderWeights(sizes, layers, *map(_weight, (adapter.embed, adapter.final_norm, adapter.lm_head)))


def _layer(layer: Any, number: int) -> LayerWeights:
    attention, mlp, where = layer.self_attn, layer.mlp, f"of decoder layer {number}"
    if not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation):
        raise ModelError(
            f"the MLP {where} has the activation {type(mlp.act_fn).__name__}; decoding knows SiLU alone (hidden_act in "
            "config.json, model.path)"
        )
    q_norm_D, k_norm_D = [_weight(norm) for norm in _head_norms(layer)] or (None, None)
    return LayerWeights(
        input_norm_C=_weight(layer.input_layernorm),
        qkv=[_product(attention, name, where) for name in ("q_proj", "k_proj", "v_proj")],
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        output=_product(attention, "o_proj", where),
        mlp_norm_C=_weight(layer.post_attention_layernorm),
        gate_up=[_product(mlp, name, where) for name in ("gate_proj", "up_proj")],
        down=_product(mlp, "down_proj", where),
    )


def _fused(weights: LayerWeights, layer: Any) -> LayerWeights:
    """With one product where several can be one."""
    fused = fuse_layer(layer)
    if fused.qkv_weight is not None:
        weights = weights._replace(qkv=[Product(fused.qkv_weight.T, fused.qkv_bias, None)])
    if fused.gate_up_weight is not None:
        weights = weights._replace(gate_up=[Product(fused.gate_up_weight.T, None, None)])
    return weights


def _head_norms(layer: Any) -> Sequence[Any]:
    """Of queries and keys, in families that have them."""
    attention = layer.self_attn
    return (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()


def _epsilon(adapter: VlmAdapter) -> float:
    """That of all norms, which are RMS norms as models/norms.py takes them."""
    norms: list[Any] = [adapter.final_norm]
    for layer in adapter.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(layer)]
    for norm in norms:
        if not hasattr(norm, "variance_epsilon"):
            raise ModelError(
                f"a norm of the decoder is a {type(norm).__name__} without variance_epsilon; decoding knows the RMS "
                "norm of the Qwen families (model.path)"
            )
    epsilons = {float(norm.variance_epsilon) for norm in norms}
    if len(epsilons) > 1:
        raise ModelError(f"the decoder's norms have the epsilons {sorted(epsilons)}; decoding needs one (model.path)")
    return epsilons.pop()


def _product(part: Any, name: str, where: str) -> Product:
    """A plain linear layer, or peft's with a LoRA adapter (models/lora.py)."""
    module = getattr(part, name)
    base = getattr(module, "base_layer", module)
    if type(base) is not nn.Linear:
        raise ModelError(
            f"{name} {where} is a {type(base).__name__}; decoding knows torch.nn.Linear, with a LoRA adapter or "
            "without (model.path, model.lora)"
        )
    adapter = None if base is module else _adapter(module, f"{name} {where}")
    return Product(_weight(base).T, None if base.bias is None else base.bias.detach(), adapter)


def _adapter(module: Any, what: str) -> LowRank | None:
    """The active adapter of a peft layer, None: it has none. `what` names the layer in errors."""
    active = [name for name in module.active_adapters if name in getattr(module, "lora_A", ())]
    variants = getattr(module, "lora_variant", {})
    problems = {
        f"a {type(module).__module__}.{type(module).__name__}": not hasattr(module, "lora_A"),
        "merged into its base layer": module.merged,
        f"adapted by {', '.join(active)} at once": len(active) > 1,
        f"LoRA of the kind {', '.join(type(v).__name__ for v in variants.values())}": any(
            n in variants for n in active
        ),
        "LoRA with biases": any(module.lora_B[name].bias is not None for name in active),
    }
    if found := [problem for problem, holds in problems.items() if holds]:
        raise ModelError(
            f"{what} is {'; '.join(found)}; decoding knows one plain LoRA adapter, not merged (model.lora)"
        )
    if not active or module.disable_adapters:
        return None
    down, up = module.lora_A[active[0]], module.lora_B[active[0]]
    return LowRank(_weight(down).T, _weight(up).T, float(module.scaling[active[0]]))


def _check_divisible(layers: Sequence[LayerWeights]) -> None:
    """Ranks sum what these products give, so each must give nothing of its own beside its part."""
    for number, layer in enumerate(layers):
        for name, product in (("o_proj", layer.output), ("down_proj", layer.down)):
            if product.bias_X is not None or product.adapter is not None:
                kind = "a bias" if product.adapter is None else "a LoRA adapter"
                raise ModelError(
                    f"{name} of decoder layer {number} has {kind}, which every tensor-parallel rank would add; set "
                    "sharing.rollout_tp and sharing.train_tp to 1"
                )


def _weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight.detach()
    return weight
