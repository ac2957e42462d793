"""What a model must not contain for a shared prefix to give exactly the full-sequence update.

A prefix is computed once and used by every response, so nothing may be random (dropout), depend on what else is in the
batch (batch norm, expert capacity), or hide earlier tokens from later ones (sliding windows). A model with any of it is
refused, never adjusted.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rollplex.errors import ModelError

# Rotary variants whose frequencies do not depend on the length of the sequence at hand.
_STATIC_ROPE = {"default", "linear", "yarn", "llama3", "proportional"}


def check_exact(model: nn.Module) -> None:
    """Raises ModelError naming the first module or config key that a shared prefix cannot be exact with."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    _check_dropout(model, base.config)
    _check_attention(base.config.get_text_config())
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"{name} is a {type(module).__name__}: its output depends on what else is in the batch, so prompts "
                "cannot be computed once and shared (model.path)"
            )


def _check_dropout(model: nn.Module, config: Any) -> None:
    for key, value in _walk(config.to_dict()):
        if "dropout" in key and isinstance(value, int | float) and value > 0:
            raise ModelError(
                f"{key} is {value} in the model's config.json: with dropout the prefix of a prompt differs from one "
                "response to the next; set it to 0 there (model.path)"
            )
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else _attribute_rate(module)
        if rate > 0:
            raise ModelError(
                f"{name} ({type(module).__name__}) has dropout {rate}: with dropout the prefix of a prompt differs "
                "from one response to the next; build the model with dropout 0 (model.path)"
            )


def _attribute_rate(module: nn.Module) -> float:
    """Dropout that a module keeps as a number and passes to a function, as attention layers do."""
    rates = (getattr(module, name, 0.0) for name in ("attention_dropout", "dropout_p", "dropout", "dropout_prob"))
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=0.0)


def _check_attention(text: Any) -> None:
    if getattr(text, "use_sliding_window", False) or "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ModelError(
            "the language model uses sliding-window attention (use_sliding_window or layer_types in its config.json); "
            "only full attention is supported: set use_sliding_window to false if the weights allow it (model.path)"
        )
    experts = next((getattr(text, key) for key in ("num_experts", "num_local_experts") if getattr(text, key, 0)), 0)
    if experts:
        raise ModelError(
            f"the language model is a mixture of {experts} experts; only dense models are supported (model.path)"
        )
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        raise ModelError(
            f"rope_type is {rope!r}: its frequencies change with the sequence length, so a prefix differs between "
            f"responses; supported: {', '.join(sorted(_STATIC_ROPE))} (rope_parameters in config.json, model.path)"
        )


def _walk(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """(dotted key, leaf) pairs of a nested mapping."""
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        dotted = f"{path}.{key}" if path else str(key)
        leaves.extend(_walk(value, dotted) if isinstance(value, dict) else [(dotted, value)])
    return leaves
