"""The timelines of docs/schedules.md are what the schedules do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollplex.schedule.registry import SCHEDULES, schedule_named
from rollplex.schedule.scripted import ScriptedExecutor
from rollplex.schedule.spec import Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Limits, run_step
from rollplex.trace import Span

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
LETTERS = {
    Phase.PREFILL: "p",
    Phase.DECODE: "-",
    Phase.REWARD: "w",
    Phase.REF_PREFIX: "r",
    Phase.ACTOR_PREFIX: "a",
    Phase.REF_RESPONSE: "R",
    Phase.ACTOR_RESPONSE: "A",
    Phase.PREFIX_BACKWARD: "B",
    Phase.OPTIMIZER: "O",
    Phase.PUBLISH: "U",
}
SECONDS = {**dict.fromkeys(Phase, 1), Phase.ACTOR_PREFIX: 2, Phase.ACTOR_RESPONSE: 2, Phase.PREFIX_BACKWARD: 2}
DECODE_S = (4, 8, 14)


def _seconds(task: Task) -> float:
    return DECODE_S[task.group or 0] if task.phase is Phase.DECODE else SECONDS[task.phase]


def _row(name: str, spans: Sequence[Span]) -> str:
    cells = [" "] * 60
    for span in spans:
        for second in range(round(span.start_s), round(span.end_s)):
            assert cells[second] == " ", "spans of one row overlap"
            cells[second] = LETTERS[Phase(span.name)]
    return f"{name:9} {''.join(cells)}".rstrip()


def _timeline(name: str) -> list[str]:
    executor = ScriptedExecutor(_seconds)
    run_step(schedule_named(name), executor, StepSpec(num_groups=3, reference=True), Limits())
    lanes = {lane: [span for span in executor.spans if span.lane == lane] for lane in Lane}
    rows = [f"{name}: {executor.makespan_s:.0f} s"]
    rows += [
        _row(f"  group {g}", [s for s in lanes[Lane.DECODE] + lanes[Lane.REWARD] if s.group == g]) for g in range(3)
    ]
    rows.append(_row("  window", lanes[Lane.WINDOW]))
    rows.append(_row("  main", lanes[Lane.MAIN]))
    return rows


def test_timelines_on_the_page_are_the_real_ones() -> None:
    wanted = "\n".join(line for name in SCHEDULES for line in _timeline(name))
    assert f"```\n{wanted}\n```\n" in PAGE.read_text(encoding="utf-8"), f"docs/schedules.md needs:\n{wanted}"
