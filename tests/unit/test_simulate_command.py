"""`rollplex simulate`: every schedule on a recipe, its chart, its JSON, its trace, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollplex.cli import app
from rollplex.planner.gantt import gantt
from rollplex.planner.workload import SIMULATED
from rollplex.schedule.registry import POOL_SCHEDULES
from rollplex.trace import Span

SMALL = ("rollplex_32b", "--hardware", "h800", "--response-tokens", "100", "--steps", "1")


def _simulate(*args: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *args])


def _seconds(*args: str) -> float:
    result = _simulate(*SMALL, "--json", *args)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["source"] == "simulated"
    return float(facts["seconds_per_step"])


def test_all_schedules_and_their_order() -> None:
    seconds = {name: _seconds("--schedule", name) for name in SIMULATED}
    assert seconds["stream"] <= seconds["rollplex"] <= seconds["serial"] < seconds["disaggregated"]
    assert seconds["rolloutpipe"] < seconds["disaggregated"]
    assert seconds["serial"] < seconds["hybrid"]  # half of the devices then only score
    assert set(SIMULATED) >= set(POOL_SCHEDULES)


def test_contention_and_length_cost_time() -> None:
    assert _seconds("--contention", "2") > _seconds("--contention", "1")
    assert _seconds("--response-tokens", "400") > _seconds()
    assert _seconds("--seed", "1") != _seconds("--seed", "2")


def test_chart_and_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = _simulate(*SMALL, "--schedule", "stream", "--trace", str(trace))
    assert result.exit_code == 0, result.output
    rows = {line[:8].strip(): line[8:] for line in result.stdout.splitlines()}
    assert {"decode", "window", "main"} <= rows.keys()
    assert set("raB") & set(rows["window"]) and "O" in rows["main"]
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["source"] for event in events} == {"simulated"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--schedule", "strem"), "--schedule is 'strem'; needed one of serial, rollplex, stream, hybrid, disag"),
        (("--hardware", "h9"), "--hardware is 'h9'"),
        (("--schedule", "async", "--rollout-devices", "30"), "no whole engines of 4 and training replicas of 8"),
        (("rollout.prompts_per_step=30",), "not a multiple of the 4 training replicas"),
        (("algorithm.num_iterations=2",), "set both to 1"),
        (("--steps", "0"), "--steps is 0"),
        (("--rollout-devices", "16"), "--rollout-devices 16 does nothing under --schedule rollplex"),
        (("--trace", "/nowhere/at/all.json"), "cannot write --trace /nowhere/at/all.json"),
        (("--response-tokens", "nan"), "--response-tokens is nan"),
        (("--spread", "inf"), "--spread is inf"),
        (("--schedule", "hybrid", "memory.devices=8"), "of 1 replicas of 8 devices"),
        (("--schedule", "hybrid", "beta=0"), "algorithm.beta 0 has none"),
    ],
)
def test_what_it_refuses(args: tuple[str, ...], message: str) -> None:
    result = _simulate(SMALL[0], *args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def _span(name: str, lane: str, start_s: float, end_s: float) -> Span:
    return Span(name, lane, start_s, end_s, step=0, group=0, source="simulated")


def test_a_chart_by_hand() -> None:
    spans = [
        _span("decode", "decode", 0.0, 8.0),
        _span("decode", "decode", 0.0, 4.0),
        _span("ref_prefix", "window", 2.0, 4.0),
        _span("optimizer", "main", 8.0, 10.0),
    ]
    lines = [line.plain.rstrip() for line in gantt(spans, width=10, ascii_only=True)]
    assert lines[:3] == ["decode  88884444", "window    rr", "main            OO"]
    assert lines[3].endswith("10 s") and "r ref_prefix" in lines[4]
    assert [line.plain for line in gantt(spans, width=10)][0].startswith("decode  \u2588\u2588\u2588\u2588\u2584")
    assert list(gantt([])) == []
