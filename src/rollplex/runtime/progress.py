"""What a run shows while it goes on: a live panel in a terminal, plain lines everywhere else.

`Progress` is an Observer of runtime/trainer.py. Use it as a context manager: the terminal is given back on errors too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rollplex.config import Config
from rollplex.runtime.reward_chart import sparkline
from rollplex.types import StepReport

if TYPE_CHECKING:
    from rollplex.runtime.trainer import RunResult

FEW_STEPS = 50  # a plain log of at most so many steps has a line for each
PLAIN_INTERVAL_S = 10.0  # seconds between plain lines of longer stages
_REMEMBERED = 20  # steps that the time estimate looks back on
_SPARK_WIDTH = 40
_BAR_WIDTH = 30
_DOTS, _BLOCKS = "\u280b", "\u2588"  # one character each of the spinner and of the sparkline


class Progress:
    """Shows a run on `console`. Phases: prepare, warm start (if any), training.

    clock: seconds, for estimates and for the interval of plain lines.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._pace = Pace(clock)
        self._plain = PlainLines(clock)
        self._rewards: list[float] = []
        self._total = self._responses = 0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            waiting = Spinner("dots" if can_encode(self._console, _DOTS) else "line", Text("loading rows and model"))
            self._live = Live(waiting, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_run_start(self, config: Config, total_steps: int) -> None:
        """Training begins, after the warm start."""
        self._total = total_steps
        self._pace.restart()
        self._plain.restart(total_steps)
        self._responses = config.rollout.prompts_per_step * config.rollout.num_generations
        self.on_message(
            f"training {total_steps} steps of {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.num_generations} responses into {config.run.output_dir}"
        )

    def on_warm_start_step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """One supervised step is done."""
        if step == 1:
            self._pace.restart()
            self._plain.restart(total)
        self._pace.tick()
        facts = {"loss": f"{metrics['loss']:.4f}", "eta": duration(self._pace.remaining(total - step))}
        self._show("warm start", step, total, facts)

    def on_step(self, report: StepReport) -> None:
        """One training step is done."""
        self._pace.tick()
        metrics = report.metrics
        reward = metrics.get("reward", math.nan)
        if math.isfinite(reward):
            self._rewards.append(reward)
        step_time = metrics.get("step_time", math.nan)
        length = metrics.get("completions/mean_length", math.nan)
        facts = {
            "reward": _number(reward, ".3f"),
            "length": _number(length, ".1f"),
            # Response tokens over the whole step, its update included.
            "tokens/s": _number(length * self._responses / step_time if step_time > 0 else math.nan, ",.0f"),
            "step time": _number(step_time, ".2f", "s"),
            "eta": duration(self._pace.remaining(self._total - report.step)),
        }
        facts |= {key: _number(value, ".3f") for key, value in metrics.items() if key.startswith("eval_reward")}
        self._show("step", report.step, self._total, facts)

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is complete on disk."""
        self.on_message(f"saved {path}")

    def on_message(self, text: str) -> None:
        """Anything worth a line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def on_run_end(self, result: RunResult) -> None:
        """The run is complete. The caller says what it left behind."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, stage: str, done: int, total: int, facts: Mapping[str, str]) -> None:
        if self._live is not None:
            self._live.update(self._panel(stage, done, total, facts))
        elif self._plain.due(done):
            words = "  ".join(f"{name} {value}" for name, value in facts.items())
            self._console.print(Text(f"{stage} {done}/{total}  {words}"), soft_wrap=True)

    def _panel(self, stage: str, done: int, total: int, facts: Mapping[str, str]) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(Text(f"{stage} {done}/{total}", "bold"), ProgressBar(total, done, width=_BAR_WIDTH))
        line = Text("  ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in facts.items())
        if not self._rewards:
            return Group(bar, line)
        spark = sparkline(self._rewards, _SPARK_WIDTH, ascii_only=not can_encode(self._console, _BLOCKS))
        return Group(bar, line, Text.assemble(("reward ", "dim"), (spark, "green")))


class Pace:
    """Seconds per step over the last steps, all that happens between them included."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._marks: deque[float] = deque(maxlen=_REMEMBERED + 1)

    def restart(self) -> None:
        """A stage begins now."""
        self._marks.clear()
        self._marks.append(self._clock())

    def tick(self) -> None:
        """A step is done now."""
        self._marks.append(self._clock())

    def remaining(self, steps: int) -> float:
        """Seconds for so many further steps at the recent pace; NaN before there is one."""
        if len(self._marks) < 2:
            return math.nan
        return (self._marks[-1] - self._marks[0]) / (len(self._marks) - 1) * steps


class PlainLines:
    """Which steps of a stage get a line in a plain log: all of a short one, else the first, the last, and one each
    PLAIN_INTERVAL_S."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._total = 0
        self._last = -math.inf

    def restart(self, total: int) -> None:
        """A stage of `total` steps begins."""
        self._total, self._last = total, -math.inf

    def due(self, step: int) -> bool:
        """Whether this step gets a line; asking counts as writing it."""
        now = self._clock()
        if self._total > FEW_STEPS and step != self._total and now - self._last < PLAIN_INTERVAL_S:
            return False
        self._last = now
        return True


def duration(seconds: float) -> str:
    """Example: duration(3725) == "1h02m"; "?" for NaN."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def can_encode(console: Console, text: str) -> bool:
    """Whether the console's encoding has these characters."""
    try:
        text.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _number(value: float, form: str, unit: str = "") -> str:
    return format(value, form) + unit if math.isfinite(value) else "-"
