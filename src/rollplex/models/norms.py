"""RMS norm of decoder and vision tower in one call where nothing is cast.

transformers writes it as seven operations. Between two operations a thread must take the interpreter back, from rewards
and media threads too, so passes of many small operations are slow beside them (docs/lab-notes.md); torch's own norm is
one. In float32 its bits on a CPU are the module's, forward and backward; the one kernel of a GPU rounds otherwise. In
16 bits the module's order of casts stays, in float64 its cast to float32, which `precision.full_float64` lifts.
"""

from __future__ import annotations

from typing import Any

import torch

from rollplex.models.precision import is_lifted


def rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """norm(x) over the last dimension; `norm` has `weight` and `variance_epsilon`, as both families' RMSNorms."""
    return normed(x, norm.weight, norm.variance_epsilon, is_lifted())


def normed(x_TC: torch.Tensor, weight_C: torch.Tensor, epsilon: float, lifted: bool) -> torch.Tensor:
    """weight * x / rms(x) over the last dimension, (..., C), as a function of tensors that TorchScript reads
    (rollout/uninterrupted.py). lifted: float64 stays float64."""
    if x_TC.dtype == torch.float32 and weight_C.dtype == torch.float32:
        return torch.rms_norm(x_TC, weight_C.shape, weight_C, epsilon)
    wide_TC = x_TC if lifted and x_TC.dtype == torch.float64 else x_TC.to(torch.float32)
    variance_T1 = wide_TC.pow(2).mean(-1, keepdim=True)
    return weight_C * (wide_TC * torch.rsqrt(variance_T1 + epsilon)).to(x_TC.dtype)
