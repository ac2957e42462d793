"""The window is opened as long as it gains, closed when it loses, and both sides are looked at again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.schedule.overlap import LOOK_AGAIN, PROBES, OverlapControl, StepSample

Cost = Callable[[int, bool], tuple[float, float, float]]
"""(step, window open) -> seconds decoded, exposed, hidden."""


def _run(control: OverlapControl, steps: int, cost: Cost, tokens: int = 100) -> tuple[list[bool], list[str]]:
    opened, messages = [], []
    for step in range(steps):
        is_open = control.window_open
        opened.append(is_open)
        message = control.record(StepSample(is_open, tokens, *cost(step, is_open)))
        messages += [message] if message else []
    return opened, messages


def _gains(_step: int, is_open: bool) -> tuple[float, float, float]:
    return (1.1, 0.5, 0.5) if is_open else (1.0, 1.0, 0.0)


def _loses(_step: int, is_open: bool) -> tuple[float, float, float]:
    return (1.8, 0.5, 0.5) if is_open else (1.0, 1.0, 0.0)


@pytest.mark.parametrize(("cost", "stays"), [(_gains, True), (_loses, False)])
def test_auto_takes_the_faster_side_and_says_so(cost: Cost, stays: bool) -> None:
    control = OverlapControl("auto")
    opened, messages = _run(control, 4 * LOOK_AGAIN, cost)
    first = 1 + 2 * PROBES
    assert {True, False} == set(opened[1:first])
    decided = opened[first:]
    assert sum(side is not stays for side in decided) == 3 * PROBES  # half a look of PROBES steps per LOOK_AGAIN
    assert len(messages) == 1
    assert messages[0].startswith("overlap on" if stays else "overlap off")
    slowdown = 1.1 if stays else 1.8
    assert f"{slowdown:.2f} times as long" in messages[0]
    assert control.decode_slowdown() == pytest.approx(slowdown)


def test_one_look_is_enough_to_change_its_mind() -> None:
    control = OverlapControl("auto")
    turn = 5 * LOOK_AGAIN
    opened, messages = _run(control, turn + LOOK_AGAIN, lambda s, o: _gains(s, o) if s < turn else _loses(s, o))
    assert [message.split(":")[0] for message in messages] == ["overlap on", "overlap off"]
    assert opened[turn - 1] is True
    look = 1 + 2 * PROBES  # looks begin at every LOOK_AGAIN-th step after the first
    assert not any(opened[turn + look :])


def test_a_window_that_gains_nothing_stays_closed() -> None:
    control = OverlapControl("auto")
    opened, _ = _run(control, 2 * LOOK_AGAIN, lambda _s, _o: (1.0, 0.0, 0.0))
    assert control.chosen is False and sum(opened) <= 2 * PROBES + 1


def test_a_drift_of_all_steps_and_a_busy_moment_between_looks_do_not_move_it() -> None:
    """Costs that rise by two percent a step, and three steps that take thrice as long: open stays 4 % faster."""
    control = OverlapControl("auto")

    def drifting(step: int, is_open: bool) -> tuple[float, float, float]:
        pace = 1.02**step * (3.0 if 20 <= step < 23 else 1.0)
        return (1.92 * pace, 0.0, 0.5) if is_open else (1.0 * pace, 1.0 * pace, 0.0)

    opened, messages = _run(control, 3 * LOOK_AGAIN, drifting)
    assert len(messages) == 1 and "4.0% faster" in messages[0]
    assert opened.count(False) == 3 * PROBES


@given(st.lists(st.floats(0.5, 2.0), min_size=200, max_size=200))
def test_a_decision_lasts_until_the_next_look(noise: list[float]) -> None:
    control = OverlapControl("auto")
    opened, messages = _run(control, 200, lambda s, o: (noise[s], 1.0 - 0.5 * o, 0.5 * o))
    decided = [opened[1 + LOOK_AGAIN * n + 2 * PROBES : 1 + LOOK_AGAIN * (n + 1)] for n in range(4)]
    assert all(len(set(steps)) == 1 for steps in decided)
    assert len(messages) <= 4


def test_longer_responses_do_not_count_as_slower() -> None:
    control = OverlapControl("auto")
    for step in range(20):
        is_open = control.window_open
        tokens = 1000 if is_open else 100
        decode_s, exposed_s, hidden_s = _gains(step, is_open)
        scale = tokens / 100
        control.record(StepSample(is_open, tokens, decode_s * scale, exposed_s * scale, hidden_s * scale))
    assert control.chosen is True


@pytest.mark.parametrize(("mode", "expected"), [("on", True), ("off", False)])
def test_fixed_modes_never_move(mode: str, expected: bool) -> None:
    opened, messages = _run(OverlapControl(mode), 60, _loses)  # type: ignore[arg-type]
    assert opened == [expected] * 60 and not messages


@given(st.sampled_from(["on", "auto"]), st.integers(1, 80))
def test_what_cannot_overlap_never_does(mode: str, steps: int) -> None:
    opened, messages = _run(OverlapControl(mode, "one CPU thread"), steps, _gains)  # type: ignore[arg-type]
    assert not any(opened) and not messages


def test_metrics_name_the_shares() -> None:
    sample = StepSample(True, 10, 2.0, 1.0, 3.0)
    metrics = OverlapControl("on").metrics(sample)
    assert metrics == {"overlap/open": 1.0, "overlap/hidden_s": 3.0, "overlap/hidden_time_ratio": 0.75}
    assert OverlapControl("on").metrics(StepSample(False, 0, 0.0, 0.0, 0.0))["overlap/hidden_time_ratio"] == 0.0


@pytest.mark.parametrize("drift", [0.98, 1.02])
def test_a_drift_is_not_taken_for_a_gain(drift: float) -> None:
    control = OverlapControl("auto")
    _run(control, LOOK_AGAIN, lambda step, _: (drift**step, 0.0, 0.0))
    assert control.chosen is False and control.decode_slowdown() == pytest.approx(1.0, abs=1e-3)
