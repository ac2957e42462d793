"""Low-rank adapters through peft: on the language model, and on the vision tower only where it is asked for by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rollplex.config import LoraConfig
from rollplex.errors import ModelError
from rollplex.models.lora_targets import target_layers


def add_lora(model: Any, config: LoraConfig, *, seed: int, base_path: str | None, freeze_vision: bool = False) -> Any:
    """`model` wrapped by peft with adapters on the layers that `config.target_modules` names; the rest is frozen.

    A plain name means linear layers of the language model only, even where the vision tower has the same name.
    Adapters of a bfloat16 model are float32, as is peft's default. Raises ModelError when peft is missing, a name
    matches no layer, or an adapter is asked for in a frozen vision tower.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError("model.lora needs the package peft: pip install 'rollplex[peft]'") from error
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    targets = target_layers(config.target_modules, linear, freeze_vision=freeze_vision)
    peft_config = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets,
        base_model_name_or_path=base_path,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, peft_config)
    # peft fills this in from the model's config; a model that was built has no path until it is saved.
    peft_config.base_model_name_or_path = base_path
    return wrapped


def is_lora(model: Any) -> bool:
    """Whether `model` is wrapped by peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")
