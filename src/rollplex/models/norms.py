"""RMS norm of decoder and vision tower in one call where nothing is cast.

transformers writes it as seven operations. Between two operations a thread must take the interpreter back, so passes
of many small operations and decoding beside them slow each other down (docs/lab-notes.md); torch's own norm is one. In
float32 its bits on a CPU are the module's, forward and backward; the one kernel of a GPU rounds otherwise. In 16 bits
the module's order of casts stays, in float64 its cast to float32, which `precision.full_float64` lifts.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """norm(x) over the last dimension; `norm` has `weight` and `variance_epsilon`, as both families' RMSNorms."""
    weight = norm.weight
    if x.dtype is torch.float32 and weight.dtype is torch.float32:
        return torch.rms_norm(x, weight.shape, weight, norm.variance_epsilon)
    normed: torch.Tensor = norm(x)
    return normed


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float, lifted: bool) -> torch.Tensor:
    """The same of tensors alone, for TorchScript (rollout/uninterrupted.py). lifted: float64 stays float64
    (precision.py)."""
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, epsilon)
    wide = x if lifted and x.dtype == torch.float64 else x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
