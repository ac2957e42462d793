"""What the lanes cost each other, found again from spans that were stretched by known factors."""

from __future__ import annotations

import pytest

from rollplex.models.shapes import shape_from_hf
from rollplex.planner.beside import Together, alone, together
from rollplex.planner.calibrate import Residual, TracedStep
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import hardware
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.passes import Algorithm
from rollplex.schedule.spec import Phase, Task
from rollplex.trace import Span

DEVICE = hardware("a100-80g")
SIDE = Side(ModelCounts(shape_from_hf({"model_type": "qwen3_vl"}, "defaults")), DEVICE, Parallel())
COST = StepCost(SIDE, SIDE, Algorithm(prefill_is_actor_prefix=True), (GroupLoad(Prompt(4000), (300,) * 8),) * 2)
STEPS = {1: TracedStep(COST, (10, 11))}
DECODE_S, PASS_S = (COST.task(Task(phase, 0)).total for phase in (Phase.DECODE, Phase.REF_PREFIX))


def _spans(decode_factor: float, window_factor: float, bias: float = 1.0) -> list[Span]:
    """Two passes beside two groups that decode; the engine does less meanwhile. Another pass, and decoding, alone."""
    beside_s = 2 * PASS_S * window_factor * bias
    decode_s = DECODE_S * bias + beside_s * (1 - 1 / decode_factor)
    ends = [0.0, beside_s / 2, beside_s]
    window = [Span(Phase.REF_PREFIX, "window", a, b, 1, i) for a, b, i in zip(ends, ends[1:], (10, 11), strict=False)]
    return [*window, *(Span(Phase.DECODE, "decode", 0.0, decode_s, 1, i) for i in (10, 11))]


@pytest.mark.parametrize(("decode", "window"), [(1.25, 1.6), (1.0, 2.0), (2.0, 1.0)])
def test_known_factors_come_back(decode: float, window: float) -> None:
    found = together(_spans(decode, window), STEPS, DEVICE, {})
    assert (found.decode, found.window) == (pytest.approx(decode), pytest.approx(window))
    assert (found + found).window == pytest.approx(window)


def test_the_bias_of_a_phase_is_no_contention() -> None:
    """A machine that takes all of it 30 % longer than the model says, beside another lane or not."""
    left = {phase: Residual(1, 1.3, 1.0, 0.0) for phase in (Phase.DECODE, Phase.REF_PREFIX)}
    found = together(_spans(1.25, 1.6, bias=1.3), STEPS, DEVICE, left)
    assert (found.decode, found.window) == (pytest.approx(1.25), pytest.approx(1.6))


def test_without_company_there_is_nothing_to_say() -> None:
    spans = [span for span in _spans(1.25, 1.6) if span.lane != "window"]
    assert alone(spans) == spans
    found = together(spans, STEPS, DEVICE, {})
    assert (found.decode, found.window) == (None, None)
    late = Span(Phase.REF_PREFIX, "window", 1e3, 1e3 + PASS_S, 1, 10)  # in its lane after the last response
    assert together([*spans, late], STEPS, DEVICE, {}).window is None
    assert alone([*spans, late]) == spans


def test_little_company_says_nothing_of_decoding() -> None:
    assert Together(decode_s=10.0, beside_s=1.4, alone_s=9.3).decode is None
    assert Together(decode_s=10.0, beside_s=2.0, alone_s=9.0).decode == pytest.approx(2.0)
    assert Together(decode_s=10.0, beside_s=2.0, alone_s=11.0).decode == 1.0  # faster than alone: an error of the model
