"""Full float64 for verification: lifts the places where transformers computes in float32 whatever the model's dtype.

A float64 model of transformers still narrows to float32 in three kinds of places (release 5.24, both families in
`models/<family>/modeling_<family>.py`):
- RMSNorm: `hidden_states.to(torch.float32)` before the mean square (decoder norms, q/k norms, and the norms of the
  Qwen2.5-VL vision tower);
- `apply_rotary_pos_emb_vision`: `q.float()`, `k.float()` in every vision block (models/tower.py casts alike);
- `eager_attention_forward`: `softmax(..., dtype=torch.float32)` (only with attn_implementation="eager", on the
  ordinary path: all others attend without it).
Two ways of computing the same thing then agree to about 1e-8 only, which would hide real faults of that size. Inside
`full_float64()` these places keep float64 where their input is float64 and do what they always did elsewhere.

What stays float32 on purpose: rotary tables, the Qwen3-VL position interpolation weights and pixel values. They are
constants, equal on both sides of a comparison, through which no gradient flows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_FAMILY_MODULES = {
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl": ("Qwen2_5_VLRMSNorm",),
    "transformers.models.qwen3_vl.modeling_qwen3_vl": ("Qwen3VLTextRMSNorm",),
}


_lifting = 0  # blocks of `full_float64` that are open


def is_lifted() -> bool:
    """Whether float64 stays float64 everywhere (`full_float64`), for code that casts as transformers does."""
    return _lifting > 0


@contextmanager
def full_float64() -> Iterator[None]:
    """Lift the casts for the duration of the block, backward passes included; everything is restored on exit.

    For verification only. It replaces functions of the transformers modules, so it holds for the whole process: no
    other thread may train or sample meanwhile.
    """
    global _lifting  # noqa: PLW0603 - as the functions that it replaces, it holds for the whole process
    originals: list[tuple[Any, str, Any]] = []
    _lifting += 1
    try:
        for module_name, norms in _FAMILY_MODULES.items():
            module = importlib.import_module(module_name)
            targets: list[tuple[Any, str, Callable[..., Any]]] = [
                *((getattr(module, norm), "forward", _rms_norm) for norm in norms),
                (module, "apply_rotary_pos_emb_vision", _rotate_vision),
                (module, "eager_attention_forward", _eager_attention),
            ]
            for owner, name, lifted in targets:
                original = getattr(owner, name)
                originals.append((owner, name, original))
                setattr(owner, name, _in_float64(lifted, original))
        yield
    finally:
        _lifting -= 1
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)


def _in_float64(lifted: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`lifted` for calls on float64 tensors, else `original`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        return (lifted if wide else original)(*args, **kwargs)

    return call


def _rms_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return module.weight * (hidden_states * torch.rsqrt(variance + module.variance_epsilon))


def _rotate_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(-2).to(q.dtype), sin.unsqueeze(-2).to(q.dtype)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _eager_attention(  # noqa: PLR0913, PLR0917 - the signature that transformers calls
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(scores.softmax(-1), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
