"""The planner's launches of eager code (planner/flops.py EAGER) against the operators that the real tiny model calls.

Views are no launches. What a pass calls once, whatever its layers (embedding, rotary tables), is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.cases import Rig, tiny_rig
from numerics.test_flops import load_of
from rollplex.models.prefix import backward_prefix, compute_prefix
from rollplex.models.shapes import shape_from_hf
from rollplex.planner.flops import EAGER, ModelCounts
from rollplex.planner.load import GroupLoad
from rollplex.train.response import GroupTokens, response_logps

ONCE = 60  # calls of a pass at most that belong to no layer, block or frame
BACKWARD_CALLS = 2.2  # for each of the forward, as EAGER's comment says: its `backward` is what they cost
VIEWS = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "expand", "lift_fresh", "permute"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze"),
    "view",
}


class Calls(TorchDispatchMode):
    """Counts operators that are no view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def called(run: Callable[[], Any]) -> int:
    """Operators that `run` calls."""
    with Calls() as calls:
        run()
    return calls.count


@pytest.fixture(scope="module")
def rig() -> Rig:
    return tiny_rig("qwen2_5_vl", torch.float32, num_heads=4, num_kv_heads=2, vision_depth=4)


@pytest.fixture(scope="module")
def counts(rig: Rig) -> ModelCounts:
    return ModelCounts(shape_from_hf(rig.loaded.model.config.to_dict(), "tiny"), 4, eager=True)


def test_a_prompt_pass_and_its_backward(rig: Rig, counts: ModelCounts) -> None:
    specs = rig.specs(("image",))
    prompts = [load_of(spec) for spec in specs]
    forward = counts.prefix(prompts).kernels + counts.vision(prompts).kernels
    assert forward <= called(lambda: compute_prefix(rig.policy, specs, "none")) <= 1.1 * forward + ONCE
    pack = compute_prefix(rig.policy, specs, "graph")
    response_logps(pack, [GroupTokens(0, ((3, 4, 5),) * 2)], 1.0, with_grad=True).logps.sum().backward()
    backward = counts.prefix_backward(prompts, "graph").kernels / EAGER.backward
    assert called(lambda: backward_prefix(pack)) == pytest.approx(BACKWARD_CALLS * backward, rel=0.2)


def test_response_passes(rig: Rig, counts: ModelCounts) -> None:
    specs = rig.specs(("image",))
    group, tokens = GroupLoad(load_of(specs[0]), (6,) * 4), [GroupTokens(0, ((3, 4, 5, 6, 7, 8),) * 4)]
    pack = compute_prefix(rig.policy, specs, "graph")
    forward = called(lambda: response_logps(pack, tokens, 1.0, with_grad=False))
    assert forward == pytest.approx(counts.response([group]).kernels, rel=0.1)
