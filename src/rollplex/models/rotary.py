"""Rotary embedding in three calls and three of its backward, for passes, decoding and the vision tower.

Sines carry the sign of the half that they multiply, so
that the rotated is x * cos + roll(x, D / 2) * sin. Product and sum are rounded once, where transformers rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch


class _Rotate(torch.autograd.Function):
    """Rotary embedding in the half-split convention, and its inverse as backward: a rotation per pair (x1, x2)."""

    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return turn(x_THD, cos_T1D, sin_T1D, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return turn(grads[0], cos_T1D, sin_T1D, -1), None, None


def turn(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """The rotation by itself, without a backward; sign -1: its inverse. Tables of (T, 1, D), sines `signed`."""
    return _add_other_half(torch.mul(x_THD, cos_T1D), x_THD, sin_T1D, sign)


def turn_into(out_THD: torch.Tensor, x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> None:
    """out = turn(x)."""
    torch.mul(x_THD, cos_T1D, out=out_THD)
    _add_other_half(out_THD, x_THD, sin_T1D, 1)


def _add_other_half(turned_THD: torch.Tensor, x_THD: torch.Tensor, sin_T1D: torch.Tensor, sign: int) -> torch.Tensor:
    other_THD = torch.roll(x_THD, x_THD.shape[-1] // 2, -1)
    return torch.addcmul(turned_THD, other_THD, sin_T1D, value=sign, out=turned_THD)


def rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (T, heads, D) with tables of (T, 1, D), sines `signed`."""
    if not torch.is_grad_enabled():  # a Function costs as much Python as the calls in it
        return turn(x_THD, cos_T1D, sin_T1D)
    rotated: torch.Tensor = _Rotate.apply(x_THD, cos_T1D, sin_T1D)
    return rotated


def signed(sin: torch.Tensor) -> torch.Tensor:
    """Sines as the rotation takes them: those of the first half of the last dimension negative."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)
