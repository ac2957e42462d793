"""RMS norms in one call: the bits of transformers' modules, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from rollplex.models.norms import rms_norm
from rollplex.models.precision import full_float64

NORMS = [Qwen2_5_VLRMSNorm, Qwen3VLTextRMSNorm]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _inputs(kind: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(sum(shape))
    norm = kind(shape[-1], eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=draw))
    x = (3 * torch.randn(shape, generator=draw)).to(dtype).requires_grad_()
    return norm, x, torch.randn(shape, generator=draw).to(dtype)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (270, 256), (1084, 256), (33, 8, 16), (5, 1, 128), (3, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_part", [False, True], ids=["contiguous", "part of a row"])
@pytest.mark.usefixtures("threads")
def test_values_and_gradients_are_those_of_the_module_bit_for_bit(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype, is_part: bool
) -> None:
    """float32 by one call; the others in the module's order of casts."""
    norm, x, upstream = _inputs(kind, shape, dtype)
    if is_part:  # as decoding has its queries, a slice of the fused projection
        x = torch.stack((x, x), dim=1).detach()[:, 0].requires_grad_()
    wanted = norm(x)
    wanted_grads = torch.autograd.grad(wanted, [x, norm.weight], upstream)
    found = rms_norm(norm, x)
    found_grads = torch.autograd.grad(found, [x, norm.weight], upstream)
    assert torch.equal(found, wanted)
    for grad, other in zip(found_grads, wanted_grads, strict=True):
        assert torch.equal(grad, other)


@pytest.mark.parametrize("kind", NORMS)
def test_lifted_float64_is_the_lifted_module(kind: Any) -> None:
    norm, x, _ = _inputs(kind, (7, 96), torch.float64)
    with full_float64():
        assert torch.equal(rms_norm(norm, x), norm(x))
        lifted = norm(x)
    assert not torch.equal(rms_norm(norm, x), lifted)


def test_float32_takes_one_call() -> None:
    norm, x, _ = _inputs(Qwen2_5_VLRMSNorm, (5, 64), torch.float32)
    norm.forward = None  # not called
    assert torch.isfinite(rms_norm(norm, x)).all()
