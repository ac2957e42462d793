"""What benchmarks/prediction.py makes of measured and predicted seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prediction import Predicted, Run, errors, lines, orders, phase_seconds, result_of, shorter
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.trace import Span

STEADY = [2.0] * 8
CONFIG = load_config(packaged_recipe("rollplex_32b"))


def test_an_order_is_one_that_nearly_every_round_shows() -> None:
    faster = [1.8] * 8
    assert shorter(faster, STEADY) and not shorter(STEADY, faster)
    assert shorter([1.8] * 7 + [2.5], STEADY)
    assert not shorter([1.8] * 6 + [2.5] * 2, STEADY)  # by the median it is shorter, and by chance
    assert not shorter([1.98] * 8, STEADY)


def test_pairs_are_counted_by_what_was_predicted_of_them() -> None:
    measured = {"serial": STEADY, "rollplex": [1.6] * 8, "stream": [1.58] * 8}  # the last two are in no order
    assert orders(measured, {"serial": 1.9, "rollplex": 1.4, "stream": 1.5}) == {"right": 2, "equal": 0, "wrong": 0}
    assert orders(measured, {"serial": 1.45, "rollplex": 1.5, "stream": 1.3}) == {"right": 1, "equal": 0, "wrong": 1}
    assert orders(measured, dict.fromkeys(measured, 1.0)) == {"right": 0, "equal": 2, "wrong": 0}


def run(setting: str, arm: str, seconds: list[float]) -> Run:
    return Run(setting, arm, Path(), CONFIG, (), tuple(seconds), {"decode": seconds[0] / 2})


def result() -> dict[str, Any]:
    runs = [run("S1", "serial", STEADY), run("S2", "serial", [1.0] * 8)]
    predicted = {
        "S1": [Predicted(2.2, {"decode": 1.1}), Predicted(1.3, {"decode": 0.5})],
        "S2": [Predicted(1.8, {"decode": 0.9}), Predicted(1.0, {"decode": 0.5})],
    }
    return result_of(runs, predicted)


def test_an_error_is_that_of_the_predicted_over_the_measured_step() -> None:
    found = result()
    assert found["measured_s"] == {"S1 serial": 2.0, "S2 serial": 1.0}
    assert round(errors(found["measured_s"], found["predicted_s"])["S1"]["S2 serial"], 6) == 0.3


def test_tables_tell_predictions_from_what_was_known() -> None:
    found = list(lines(result()))
    assert found[2] == "| S1 serial | 2.000 | (+10%) | -10% |"
    assert found[3] == "| S2 serial | 1.000 | +30% | (+0%) |"
    assert "| S2 from S1 | +0% |" in found and "| S1 from S1 | (+10%) |" in found
    assert "predicted from another setting within 15%: 1 of 2; not: S2 serial from S1 +30%" in found


def test_groups_that_decode_together_count_once() -> None:
    decoding = [Span("decode", "decode", 1.0, 3.0, 1, 0), Span("decode", "decode", 1.0, 4.0, 1, 1)]
    passes = [Span("ref_prefix", "main", 0.0, 0.5, 1, 0), Span("ref_prefix", "window", 1.0, 1.25, 1, 1)]
    others = [Span("prompts", "main", 0.0, 9.0, 1), Span("reward", "reward", 4.0, 9.0, 1, 0)]
    assert phase_seconds([*decoding, *passes, *others]) == {"decode": 3.0, "ref_prefix": 0.75}
