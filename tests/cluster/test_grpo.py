"""Five GRPO steps with training at TP 4 and rollout at TP 2, on one copy of the weights, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from cluster.grpo import STEPS, grpo_plan, in_one_process, on_ranks
from cluster.processes import run_ranks
from cluster.training import SIZES
from numerics.cases import tiny_rig
from rollplex.weights.share import Backing, Side
from rollplex.weights.transfer import received_numel


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_five_steps_at_two_degrees_are_those_of_one_process(family: str) -> None:
    train_tp, rollout_tp = 4, 2
    wanted = in_one_process(family)
    answers = run_ranks(on_ranks, 4, family, train_tp, rollout_tp)
    rig = tiny_rig(family, torch.float32, **SIZES)
    plan = grpo_plan(rig, train_tp, rollout_tp)
    start = {name: p.detach() for name, p in rig.loaded.model.named_parameters()}
    for device, number in itertools.product(range(4), range(STEPS)):
        found, truth = answers[device][number], wanted[number]
        for key, responses in truth["sampled"].items():
            for one, other in zip(found["sampled"][key], responses, strict=True):
                assert one.token_ids == other.token_ids, (device, number, key)
                assert one.logps == pytest.approx(other.logps, abs=1e-5)
        assert found["ratios"] == (1.0, 1.0)
        assert found["gap"] < 1e-5  # a stale cache of vision features, or of any weight, would show here
        assert found["rewards"] == truth["rewards"] and found["loss"] == pytest.approx(truth["loss"], abs=1e-5)
        assert found["received"] == 4 * sum(received_numel(plan, c.unit, device) for c in plan.units)
        full, first = (_rollout_shard(plan, device, w) for w in (truth["weights"], start))
        wrong, moved = 0.0, 0.0
        for name, weight in full.items():
            wrong += float((found["weights"][name] - weight).double().square().sum())
            moved += float((weight - first[name]).double().square().sum())
        assert moved > 0 and (wrong / moved) ** 0.5 < 1e-4, (device, number, (wrong / moved) ** 0.5)
    assert all(answer[-1] == {"inside": True, "buffers": 0} for answer in answers)  # one copy, nothing rebuilt


def _rollout_shard(plan: object, device: int, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    backing = Backing.create(plan, device, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    backing.load(full, "what it must be")
    return backing.parameters(Side.ROLLOUT)
