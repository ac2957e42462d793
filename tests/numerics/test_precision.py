"""full_float64: what it lifts, what it leaves alone, that it restores everything."""

from __future__ import annotations

import importlib

import pytest
import torch

from numerics.cases import FAMILIES, tiny_rig
from rollplex.models.precision import full_float64
from rollplex.train.full_sequence import full_sequence_logps

NORMS = {"qwen2_5_vl": "Qwen2_5_VLRMSNorm", "qwen3_vl": "Qwen3VLTextRMSNorm"}


def _module(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _functions(family):
    module = _module(family)
    norm = getattr(module, NORMS[family])
    return [norm.forward, module.apply_rotary_pos_emb_vision, module.eager_attention_forward]


def _logps(made, names=("image", "video", "text")):
    rows = [(spec, (1, 2, 3, 4)) for spec in made.specs(names)]
    return full_sequence_logps(made.policy, rows, 1.0, with_grad=False).logps


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_restored_also_after_an_error(family):
    before = _functions(family)
    with pytest.raises(KeyError), full_float64():
        assert all(a is not b for a, b in zip(_functions(family), before, strict=True))
        raise KeyError("inside")
    assert all(a is b for a, b in zip(_functions(family), before, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float64_becomes_exact_to_its_own_rounding(family, attention):
    """A shift of the input by 1e-12 moves the output smoothly inside; outside it disappears in float32 rounding."""
    made = tiny_rig(family, num_layers=2)
    made.loaded.model.set_attn_implementation(attention)
    embed = made.policy.adapter.embed.weight
    step = 1e-7 * torch.randn(embed.shape, generator=torch.Generator().manual_seed(0), dtype=embed.dtype)

    def curvature():
        """f(x+h) - 2 f(x) + f(x-h): of order h^2 where f is smooth, of rounding where it is not."""
        values = []
        for sign in (1, 0, -1):
            with torch.no_grad():
                embed.add_(sign * step)
            values.append(_logps(made))
            with torch.no_grad():
                embed.sub_(sign * step)
        return float((values[0] - 2 * values[1] + values[2]).abs().max())

    with full_float64():
        assert curvature() < 1e-10
    assert curvature() > 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_same_function_otherwise(family, attention):
    """In float64 the outputs move by float32 rounding only; float32 and bfloat16 models are untouched, bit for bit."""
    for dtype, bound in ((torch.float64, 1e-5), (torch.float32, 0.0), (torch.bfloat16, 0.0)):
        made = tiny_rig(family, dtype, num_layers=2)
        made.loaded.model.set_attn_implementation(attention)
        plain = _logps(made)
        with full_float64():
            lifted = _logps(made)
        assert float((plain - lifted).abs().max()) <= bound
        assert (dtype == torch.float64) != torch.equal(plain, lifted)
