"""Linear layers and MLPs of decoder and vision tower, without the calls that nn.Module makes around them.

A pass of a few hundred tokens makes as many calls in `Module.__call__` as in its layers, all with the interpreter in
hand (norms.py). Modules of other types (peft's) are called as they are; forward hooks of plain ones are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rollplex.models.steady import by_rows


def linear(module: Any, x_TC: torch.Tensor) -> torch.Tensor:
    """module(x_TC), of a module that takes each row by itself."""
    if type(module) is nn.Linear:
        return by_rows(lambda x_TC: F.linear(x_TC, module.weight, module.bias), x_TC)
    return by_rows(module, x_TC)


def mlp(module: Any, x_TC: torch.Tensor) -> torch.Tensor:
    """module(x_TC) of the MLPs of both families: with a gate (the decoders, Qwen2.5-VL's tower) or without (Qwen3-VL's
    tower). Told by their parts' names, so another family's MLP needs a look at its formula."""
    if hasattr(module, "gate_proj"):
        activated_TI = module.act_fn(linear(module.gate_proj, x_TC))
        return linear(module.down_proj, activated_TI * linear(module.up_proj, x_TC))
    return linear(module.linear_fc2, module.act_fn(linear(module.linear_fc1, x_TC)))


def added(x_TC: torch.Tensor, change_TC: torch.Tensor) -> torch.Tensor:
    """x + change, of which nobody else has the change: without a graph the sum takes its place."""
    return x_TC + change_TC if torch.is_grad_enabled() else torch.add(x_TC, change_TC, out=change_TC)
