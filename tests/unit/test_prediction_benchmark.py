"""What benchmarks/prediction.py makes of measured and predicted seconds."""

from __future__ import annotations

from prediction import SCHEDULES, extent_s, lines, ordered_as
from rollplex.trace import Span


def test_order_is_right_where_steps_differ() -> None:
    measured = {"serial": 2.0, "rollplex": 1.6, "stream": 1.58}
    assert ordered_as(measured, {"serial": 1.9, "rollplex": 1.4, "stream": 1.5})  # the last two are a tie
    assert not ordered_as(measured, {"serial": 1.4, "rollplex": 1.5, "stream": 1.3})
    assert not ordered_as(measured, dict.fromkeys(SCHEDULES, 1.0))  # no order is not the right one


def test_own_setting_is_in_brackets() -> None:
    steps = {"S1": {"serial": 2.0}, "S2": {"serial": 1.0}}
    result = {
        "measured_s": steps,
        "predicted_s": {"S1": steps, "S2": {"S1": {"serial": 2.5}, "S2": {"serial": 1.0}}},
        "order_right": {"S1": {"S1": True, "S2": False}, "S2": {"S1": True, "S2": True}},
    }
    found = list(lines(result))
    assert found[2] == "| S1 | serial | 2.000 | (+0%) | +25% |"
    assert found[3] == "| S2 | serial | 1.000 | +0% | (+0%) |"
    assert found[-1].endswith("S1: 1 of 2, S2: 2 of 2")


def test_a_step_lasts_from_its_first_span_to_its_last() -> None:
    spans = [Span("decode", "decode", 1.0, 3.0, 1), Span("optimizer", "main", 3.5, 4.0, 1)]
    assert extent_s([*spans, Span("decode", "decode", 10.0, 15.0, 2)]) == 4.0
