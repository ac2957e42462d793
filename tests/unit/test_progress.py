"""What a run shows: plain lines where there is no terminal, a live panel where there is one."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from rollplex.config import Config
from rollplex.runtime.progress import FEW_STEPS, PLAIN_INTERVAL_S, Pace, PlainLines, Progress, can_encode, duration
from rollplex.types import StepReport

CONFIG = Config.model_validate(
    {"model": {"build": {}}, "rollout": {"prompts_per_step": 4, "num_generations": 2}, "run": {"output_dir": "out"}}
)
METRICS = {"reward": 0.5, "completions/mean_length": 10.0, "step_time": 2.0}


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_short_run_has_a_line_for_each_step() -> None:
    console, clock = plain_console(), Clock()
    with Progress(console, clock=clock) as progress:
        progress.on_run_start(CONFIG, 3)
        for step in (1, 2, 3):
            clock.now += 2.0
            progress.on_step(StepReport(step, METRICS))
    lines = written(console).splitlines()
    assert lines[0] == "training 3 steps of 4 prompts x 2 responses into out"
    assert [line.split("  ")[0] for line in lines[1:]] == ["step 1/3", "step 2/3", "step 3/3"]
    # 4 x 2 responses of 10 tokens in 2 seconds; two steps of two seconds are left
    assert "reward 0.500  length 10.0  tokens/s 40  step time 2.00s  eta 4s" in lines[1]
    assert "\x1b" not in written(console)


def test_a_long_run_has_a_line_each_interval_and_for_the_last_step() -> None:
    console, clock = plain_console(), Clock()
    total = FEW_STEPS + 50
    with Progress(console, clock=clock) as progress:
        progress.on_run_start(CONFIG, total)
        for step in range(1, total + 1):
            clock.now += 1.0
            progress.on_step(StepReport(step, METRICS))
    steps = [int(line.split()[1].split("/")[0]) for line in written(console).splitlines()[1:]]
    assert steps == [1, *range(11, total, 10), total]


def test_warm_start_then_training() -> None:
    console, clock = plain_console(), Clock()
    with Progress(console, clock=clock) as progress:
        for step in (1, 2):
            clock.now += 1.0
            progress.on_warm_start_step(step, 2, {"loss": 3.0})
        progress.on_run_start(CONFIG, 1)
        clock.now += 1.0
        progress.on_step(StepReport(1, METRICS))
        progress.on_checkpoint(Path("out/checkpoint-1"))
    text = written(console)
    assert text.index("warm start 2/2  loss 3.0000  eta 0s") < text.index("step 1/1") < text.index("checkpoint-1")


def test_a_step_without_rewards_still_shows() -> None:
    """dynamic_sampling_exhausted=skip reports steps with times only."""
    console = plain_console()
    with Progress(console) as progress:
        progress.on_run_start(CONFIG, 2)
        progress.on_step(StepReport(1, {"step_time": 1.0}))
        progress.on_step(StepReport(2, {"step_time": 0.0, "reward": math.nan}))
    assert "step 1/2  reward -  length -  tokens/s -  step time 1.00s" in written(console)
    assert "step 2/2  reward -" in written(console)


def test_evaluations_show() -> None:
    console = plain_console()
    with Progress(console) as progress:
        progress.on_run_start(CONFIG, 1)
        progress.on_step(StepReport(1, METRICS | {"eval_reward": 0.75, "eval_rows": 4.0}))
    assert "eval_reward 0.750" in written(console)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_panel_of_a_terminal_fits_its_encoding_and_gives_it_back(encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=file, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    with pytest.raises(RuntimeError, match="boom"), Progress(console) as progress:
        progress.on_warm_start_step(1, 5, {"loss": 1.0})
        progress.on_run_start(CONFIG, 20)
        for step in range(1, 6):
            progress.on_step(StepReport(step, METRICS | {"reward": step / 5}))
        raise RuntimeError("boom")
    file.flush()
    text = raw.getvalue().decode(encoding)
    assert "step 5/20" in text and "reward 1.000" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is shown again"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Progress(console) as progress:
        progress.on_run_start(CONFIG, 1)
        progress.on_step(StepReport(1, METRICS))
    assert "\x1b" not in written(console) and "step 1/1  reward 0.500" in written(console)


def test_messages_stay_whole_and_are_no_markup() -> None:
    console = Console(file=io.StringIO(), width=20)
    with Progress(console) as progress:
        progress.on_message("saved [bold]a very long path that no line holds[/bold]/checkpoint-7")
    assert written(console) == "saved [bold]a very long path that no line holds[/bold]/checkpoint-7\n"


def test_pace_forgets_old_steps_and_the_stage_before() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.restart()
    assert math.isnan(pace.remaining(3))
    for _ in range(30):
        clock.now += 100.0
        pace.tick()
    for _ in range(20):
        clock.now += 1.0
        pace.tick()
    assert pace.remaining(5) == pytest.approx(5.0)
    pace.restart()
    assert math.isnan(pace.remaining(5))


def test_plain_lines_come_again_after_the_interval() -> None:
    clock = Clock()
    lines = PlainLines(clock)
    lines.restart(FEW_STEPS + 1)
    assert lines.due(1) and not lines.due(2)
    clock.now += PLAIN_INTERVAL_S
    assert lines.due(3) and not lines.due(4) and lines.due(FEW_STEPS + 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599.6, "1h00m"), (3725, "1h02m"), (math.nan, "?")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_can_encode() -> None:
    assert can_encode(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8")), "\u2588")
    assert not can_encode(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1")), "\u2588")
