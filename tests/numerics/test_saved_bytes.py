"""Bytes counted from sizes against what autograd saves while the real tiny models run, within 3 %.

Prompts of unequal lengths in one pack cost a copy of each layer's attention output, which is not counted: 8 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from numerics.cases import FAMILIES, MIXES, Rig, tiny_rig
from rollplex.memory.model_bytes import Activations, kv_bytes_per_token
from rollplex.models.policy import Policy
from rollplex.models.prefix import compute_prefix
from rollplex.models.shapes import shape_from_hf
from rollplex.train.response import GroupTokens, response_logps


def _saved(policy: Policy, run: Callable[[], Any]) -> tuple[int, Any]:
    """(bytes of the storages that `run` saves for a backward, weights and prefixes aside; its result)."""
    known = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known), result


def _counted(rig: Rig) -> Activations:
    shape = shape_from_hf(rig.policy.model.config.to_dict(), "test")
    return Activations(shape, rig.policy.dtype.itemsize, 1, sequence_parallel=False, kernels="eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_passes_save(family: str, mix: str, dtype: torch.dtype) -> None:
    rig = tiny_rig(family, dtype, num_layers=6, num_heads=4, num_kv_heads=2)
    act, specs = _counted(rig), rig.specs(MIXES[mix])
    tokens = sum(spec.num_tokens for spec in specs)
    visual = sum(int((spec.token_types > 0).sum()) for spec in specs)
    found, pack = _saved(rig.policy, lambda: compute_prefix(rig.policy, specs, "graph"))
    # The last layer's keys and values are the boundary, though its attention saves them.
    found -= kv_bytes_per_token(act.shape, act.dtype_bytes, 1) // act.shape.text.num_layers * tokens
    assert act.decoder(tokens, prefix=True) + act.vision(visual) == pytest.approx(
        found, rel=0.08 if len(specs) > 1 else 0.03
    )

    groups = [GroupTokens(number, ((5, 6, 7, 8, 9),) * 4) for number in range(len(specs))]
    fed = 4 * 4 * len(groups)
    found, _ = _saved(rig.policy, lambda: response_logps(pack, groups, 1.0, with_grad=True))
    # Every token is fed but the last of a response; all five are scored.
    assert act.decoder(fed, prefix=False) + act.final(fed * 5 // 4) == pytest.approx(found, rel=0.03)
