"""Data-parallel ranks whose prompts are of different kinds: the tower's gradients are summed once per step, whoever ran
it and however many micro-batches each rank had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.processes import run_ranks
from cluster.training import Case, one_process, one_step, plan_of
from numerics.cases import relative_error
from rollplex.models.policy import Policy
from rollplex.parallel.groups import Job
from rollplex.train.update import Updater
from rollplex.weights.share import Backing, Side

BOUND = 1e-10
NAMES = ("image", "text", "video_image", "short_text", "text", "text", "short_text")


def counted_step(job: Job, case: Case) -> dict[str, Any]:
    """`one_step`, with the numbers of this rank's response micro-batches and of its passes through the tower."""
    counts = {"micro_batches": 0, "encoded": 0}
    respond, encode = Updater.respond, Policy.encode

    def counting_respond(self: Updater, *args: Any, **kwargs: Any) -> Any:
        results = list(respond(self, *args, **kwargs))
        counts["micro_batches"] += len(results)
        return results

    def counting_encode(self: Policy, *args: Any) -> Any:
        features = encode(self, *args)
        counts["encoded"] += features is not None
        return features

    Updater.respond, Policy.encode = counting_respond, counting_encode  # type: ignore[method-assign]
    return one_step(job, case) | counts


@pytest.mark.parametrize(
    ("owners", "encoders"),
    [((0, 1, 0, 1, 1, 1, 1), {0}), ((0, 0, 1, 0, 0, 0, 0), {0, 1}), ((0,) * 7, {0})],
    ids=["media-beside-text", "text-among-media", "a-rank-without-groups"],
)
def test_the_towers_gradients_are_those_of_one_process(owners: tuple[int, ...], encoders: set[int]) -> None:
    case = Case("qwen2_5_vl", NAMES, 1, 1, owners, "graph")
    wanted, answers = one_process(case), run_ranks(counted_step, 2, case)
    first, second = answers
    assert first["micro_batches"] != second["micro_batches"]
    assert {rank for rank, answer in enumerate(answers) if answer["encoded"]} == encoders
    assert second["micro_batches"] > 0 or 1 not in owners
    tower = {name: gradient for name, gradient in wanted["gradients"].items() if ".visual." in name}
    found = {name: torch.cat([first["gradients"][name], second["gradients"][name]]) for name in tower}
    assert tower and relative_error(found, tower) < BOUND
    assert all(answer["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=BOUND) for answer in answers)
    handed_over = Backing.create(plan_of(case.rig(), 1, 1), 0, torch.float64, torch.device("cpu"))
    handed_over.load(wanted["weights"], "what it must be")
    for name, weight in handed_over.parameters(Side.ROLLOUT).items():
        assert all(float((answer["rollout"][name] - weight).abs().max()) < 1e-9 for answer in answers), name
