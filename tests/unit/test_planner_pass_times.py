"""Looked-up times against the cost model that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.models.shapes import shape_from_hf
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import hardware
from rollplex.planner.load import GroupLoad, video_prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.pass_times import PassTimes
from rollplex.planner.passes import Algorithm
from rollplex.schedule.spec import Phase, PrefixMode, Task

COUNTS = ModelCounts(shape_from_hf({"model_type": "qwen2_5_vl"}, "defaults"))
PROMPT = video_prompt(2000, 1800, COUNTS.shape.vision)


def _cost(prefix: PrefixMode = PrefixMode.SHARED, **options: Any) -> StepCost:
    side = Side(COUNTS, hardware("h800"), Parallel(tensor=8, data=2))
    return StepCost(side, side, Algorithm(prefix=prefix), (GroupLoad(PROMPT, (64,) * 8),) * 2, **options)


_even = st.lists(st.integers(400, 900), min_size=8, max_size=8).map(lambda lengths: (lengths, 0.1))
_any = st.lists(st.integers(1, 900), min_size=8, max_size=8).map(lambda lengths: (lengths, 0.2))


@settings(max_examples=50)
@given(_even | _any, st.sampled_from(PrefixMode))
def test_times_are_those_of_the_cost_model(drawn: tuple[list[int], float], prefix: PrefixMode) -> None:
    lengths, bound = drawn
    load = GroupLoad(PROMPT, tuple(lengths))
    cost = dataclasses.replace(_cost(prefix), groups=(load, load))
    times = PassTimes(_cost(prefix))
    for phase in Phase:
        if phase in (Phase.DECODE, Phase.OPTIMIZER, Phase.PUBLISH):
            continue
        wanted = cost.task(Task(phase, 0)).total
        # Weights are read once for each micro-batch, whose number jumps: one more of a few at most.
        assert times.of(phase, load) == pytest.approx(wanted, rel=bound, abs=0.02), phase


def test_what_is_of_the_whole_step_or_decoded() -> None:
    cost = _cost(reward_s=0.5, host_state_bytes=1e9)
    times = PassTimes(cost)
    assert times.of(Phase.OPTIMIZER, None) == cost.optimizer.total
    assert times.of(Phase.REWARD, cost.groups[0]) == 0.5
    with pytest.raises(ValueError, match="decoded by an engine"):
        times.of(Phase.DECODE, cost.groups[0])
