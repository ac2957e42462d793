"""The rotation of queries and keys against its formula on halves, bit for bit, forward and backward."""

from __future__ import annotations

import pytest
import torch

from rollplex.models.rotary import rotate


def _by_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """(x1 cos - x2 sin, x2 cos + x1 sin), sign -1: the inverse. cos and sin: (T, 1, D / 2)."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat(
        (torch.mul(x1, cos).addcmul(x2, sin, value=-sign), torch.mul(x2, cos).addcmul(x1, sin, value=sign)), -1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"), [(1, 1, 16), (5, 1, 32), (7, 2, 80), (270, 8, 32), (64, 3, 128)]
)
@pytest.mark.parametrize("layout", ["contiguous", "every other head", "expanded gradient"])
def test_rotation_has_the_bits_of_its_formula(
    dtype: torch.dtype, tokens: int, heads: int, head_dim: int, layout: str
) -> None:
    draw = torch.Generator().manual_seed(tokens + head_dim)
    angles = 6 * torch.rand(tokens, 1, head_dim // 2, generator=draw)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = torch.randn(tokens, 2 * heads, head_dim, generator=draw).to(dtype)
    x = x[:, ::2] if layout == "every other head" else x[:, :heads].contiguous()
    upstream = torch.randn(tokens, heads, head_dim, generator=draw).to(dtype)
    if layout == "expanded gradient":
        upstream = upstream[:1, :, :1].expand(tokens, heads, head_dim)
    x.requires_grad_()
    found = rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    assert torch.equal(found, _by_halves(x.detach(), cos, sin, 1))
    with torch.no_grad():
        assert torch.equal(found, rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
    (gradient,) = torch.autograd.grad(found, x, upstream)
    assert torch.equal(gradient, _by_halves(upstream, cos, sin, -1))
