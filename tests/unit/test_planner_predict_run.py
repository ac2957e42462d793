"""A run's step in virtual time: the sum of its tasks one after another, less what is hidden."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.config import Config
from rollplex.planner.hardware import hardware
from rollplex.planner.predict_run import Machine, predicted_step
from rollplex.planner.traced_run import run_cost, run_side
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.schedule.spec import PER_STEP, Phase, Task

DEVICE = hardware("a100-80g")
PROMPT, RESPONSE, PROMPTS = 3000, 400, 4
ROW = {
    "step": 3,
    "prefix/unique_tokens_ratio": (PROMPTS * PROMPT + 8 * PROMPTS * RESPONSE) / (8 * PROMPTS * (PROMPT + RESPONSE)),
    "completions/mean_length": float(RESPONSE),
    "completions/max_length": float(RESPONSE),
}


def _config(schedule: str, *overrides: str) -> Config:
    overlap = "off" if schedule == "serial" else "on"
    small = ["model.build.num_layers=12", "rollout.prompts_per_step=4", "data.image_size=224"]
    named = [f"schedule.name={schedule}", f"schedule.overlap={overlap}"]
    return load_config(packaged_recipe("rollplex_32b"), [*small, *named, *overrides])


def _predict(schedule: str, decode: float = 1.0, window: float = 1.0, *overrides: str) -> tuple[float, Any]:
    return predicted_step(_config(schedule, *overrides), ROW, Machine(DEVICE, decode, window, eager=False))


def _seconds(phase: Phase, group: int | None = 0) -> float:
    config = _config("serial")
    cost = run_cost(config, ROW, PROMPTS, run_side(config, DEVICE, eager=False), pack=1)
    return cost.task(Task(phase, group)).total


def test_serial_is_one_after_another() -> None:
    each = (Phase.PREFILL, Phase.REF_PREFIX, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD)
    wanted = sum(PROMPTS * _seconds(phase) for phase in each) + _seconds(Phase.DECODE)
    wanted += sum(_seconds(phase, None) for phase in PER_STEP)
    assert _predict("serial")[0] == pytest.approx(wanted, rel=1e-3)


def test_prompts_that_fit_together_are_one_pass() -> None:
    two = ("schedule.unit_tokens=6000", "train.micro_batch_tokens=6000")
    alone_s, both_s = (_predict("serial", 1.0, 1.0, *two, *more) for more in (("schedule.unit_tokens=3000",), ()))
    assert [span.group for span in both_s[1] if span.name == Phase.REF_PREFIX] == [0, 1]
    assert both_s[0] < alone_s[0]  # weights are read once for two prompts


def test_rollplex_hides_the_references_prefixes_and_pays_for_it() -> None:
    serial, hidden_s = _predict("serial")[0], PROMPTS * _seconds(Phase.REF_PREFIX)
    assert hidden_s < _seconds(Phase.DECODE)
    assert _predict("rollplex")[0] == pytest.approx(serial - hidden_s, rel=1e-3)
    # The window takes 1.5 times as long, and decoding 1.2 times as long as it lasts.
    slower_s = 1.5 * hidden_s * (1 - 1 / 1.2)
    assert _predict("rollplex", 1.2, 1.5)[0] == pytest.approx(serial - hidden_s + slower_s, rel=1e-3)
    assert _predict("rollplex", 2.0, 2.0)[0] == pytest.approx(serial, rel=1e-3)


def test_a_closed_window_hides_nothing() -> None:
    assert _predict("rollplex", 1.0, 1.0, "schedule.overlap=off")[0] == pytest.approx(_predict("serial")[0])
