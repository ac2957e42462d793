"""Training on several real processes gives the loss, gradients and weights of one, to float64 rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.processes import run_ranks
from cluster.training import Case, Tensors, one_process, one_step, plan_of
from numerics.cases import relative_error
from rollplex.models.prefix import Activations
from rollplex.models.shard_plan import Kind
from rollplex.weights.conventions import piece
from rollplex.weights.pieces import PADDING
from rollplex.weights.share import Backing, Side

BOUND = 1e-10
MIXED = ("image", "text", "video_image", "short_text")


def _whole(case: Case, answers: list[dict[str, Any]], key: str) -> Tensors:
    """Full tensors from the ranks' shards; what several ranks hold must be bitwise equal there."""
    plan = plan_of(case.rig(), case.degree, case.rollout_degree)
    shards: dict[int, Tensors] = {}
    replicas = 1 + max(answer["rank"][0] for answer in answers)
    for tensor_rank in range(case.degree):
        mine = sorted((a for a in answers if a["rank"][1] == tensor_rank), key=lambda a: a["rank"][0])
        names = mine[0][key].keys()
        assert all(answer[key].keys() == names for answer in mine)
        shards[tensor_rank] = {
            name: torch.cat([answer[key][name] for answer in mine]) if replicas > 1 else mine[0][key][name]
            for name in names
        }
    found: Tensors = {}
    for classified in plan.units:
        unit = classified.unit
        for rank, tensors in shards.items():
            for parameter in piece(unit, plan.layouts[0], rank, case.degree, plan.padded[0]).parameters:
                if parameter.name not in tensors:
                    continue
                whole = found.setdefault(
                    parameter.name, torch.full(unit.members[0].shape, torch.nan, dtype=torch.float64)
                )
                for run in parameter.runs:
                    if run.tensor == PADDING:
                        continue
                    at = run.at - parameter.at
                    part = tensors[parameter.name].movedim(unit.dim, 0)[at : at + run.length]
                    place = whole.movedim(unit.dim, 0)[run.start : run.stop]
                    held_by_several = unit.kind in (Kind.REPLICATED, Kind.VISION) or unit.members[0].heads
                    assert place.isnan().all() or (held_by_several and torch.equal(place, part)), parameter.name
                    place.copy_(part)
    return found


def _check(case: Case, world: int) -> list[dict[str, Any]]:
    """Run `case` both ways and compare; what each process answered."""
    wanted = one_process(case)
    answers = run_ranks(one_step, world, case)
    error = relative_error(_whole(case, answers, "gradients"), wanted["gradients"])
    assert error < BOUND, error
    moved = _whole(case, answers, "weights")
    assert moved.keys() == wanted["weights"].keys()
    assert max(float((moved[name] - weight).abs().max()) for name, weight in wanted["weights"].items()) < 1e-9
    plan = plan_of(case.rig(), case.degree, case.rollout_degree)
    for process, answer in enumerate(answers):
        handed_over = Backing.create(plan, process % case.block, torch.float64, torch.device("cpu"))
        handed_over.load(wanted["weights"], "what it must be")
        for name, weight in handed_over.parameters(Side.ROLLOUT).items():
            assert float((answer["rollout"][name] - weight).abs().max()) < 1e-9, (process, name)
    assert all(answer["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=BOUND) for answer in answers)
    assert wanted["grad_norm"] > case.config.train.max_grad_norm, "clipping was not exercised"
    losses = {answer["rank"][0]: answer["loss"] for answer in answers}  # ranks of one replica have the same
    assert sum(losses.values()) == pytest.approx(wanted["loss"], rel=BOUND, abs=BOUND)
    return answers


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("degree", "rollout"), [(2, 1), (4, 2)])
def test_tensor_parallel(family: str, degree: int, rollout: int) -> None:
    """TP 4 on 2 key/value heads: each is on two ranks. The rollout's degree stores row-parallel weights transposed."""
    mode = "recompute" if degree == 2 else "checkpoint"
    case = Case(family, MIXED, degree, rollout, (0,) * 4, mode, tied=family == "qwen3_vl", beta=0.1)
    _check(case, degree)


@pytest.mark.parametrize(("family", "mode"), [("qwen2_5_vl", "graph"), ("qwen3_vl", "checkpoint")])
def test_tensor_parallel_in_chunks_of_rows(family: str, mode: Activations) -> None:
    """Each chunk has its own sums over ranks, as many on each rank; one process runs whole passes."""
    _check(Case(family, MIXED, 2, 1, (0,) * 4, mode, beta=0.1, chunk_tokens=11), 2)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("names", [("image",), ("video",), ("text",)], ids=lambda names: names[0])
def test_each_kind_of_prompt_under_tensor_parallelism(family: str, names: tuple[str, ...]) -> None:
    _check(Case(family, names, 2, 2, (0,), "graph"), 2)


@pytest.mark.parametrize(
    ("family", "owners"),
    [("qwen2_5_vl", (0, 1, 0, 1)), ("qwen3_vl", (0, 1, 0, 1)), ("qwen2_5_vl", (0, 0, 0, 1))],
    ids=["media-and-text", "media-and-text-qwen3", "uneven"],
)
def test_fsdp_and_tensor_parallel(family: str, owners: tuple[int, ...]) -> None:
    """One replica has the media, the other text only: their numbers of passes differ, and so do their collectives'."""
    _check(Case(family, MIXED, 2, 2, owners, "graph", tied=family == "qwen2_5_vl"), 4)


def test_training_at_a_smaller_degree_than_the_rollout() -> None:
    """One block of 4 devices: two training replicas of TP 2, whose transposed shards hold the rollout's at TP 4."""
    _check(Case("qwen2_5_vl", MIXED, 2, 4, (0, 1, 1, 0)), 4)


def test_text_alone_moves_no_vision_weight_on_any_rank() -> None:
    case = Case("qwen2_5_vl", ("text", "short_text"), 2, 2, (0, 1), "graph")
    answers = _check(case, 4)
    assert all(not any(".visual." in name for name in answer["gradients"]) for answer in answers)
