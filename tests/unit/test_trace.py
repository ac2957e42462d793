"""Spans as JSON lines and as a trace: nothing lost, nothing hidden."""

from __future__ import annotations

import json
import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.schedule.registry import SCHEDULES, schedule_named
from rollplex.schedule.scripted import ScriptedExecutor
from rollplex.schedule.spec import StepSpec
from rollplex.schedule.step import Limits, run_step
from rollplex.trace import Span, from_jsonl, to_chrome, to_jsonl

_times = st.floats(0, 1e6).map(lambda s: 1.7e9 + s)


@st.composite
def _spans(draw: st.DrawFn) -> list[Span]:
    source = draw(st.sampled_from(["measured", "simulated"]))
    spans = []
    for _ in range(draw(st.integers(1, 12))):
        start_s, end_s = sorted((draw(_times), draw(_times)))
        lane = draw(st.sampled_from(["main", "decode", "reward"]))
        spans.append(
            Span("decode", lane, start_s, end_s, draw(st.integers(1, 3)), draw(st.none() | st.just(2)), source)
        )
    return spans


@given(_spans())
def test_jsonl_keeps_every_field(spans: list[Span]) -> None:
    assert from_jsonl(to_jsonl(spans)) == spans


@given(_spans())
def test_chrome_trace_holds_every_span_in_its_lane_and_none_under_another(spans: list[Span]) -> None:
    trace = json.loads(to_chrome(spans, "a run"))
    assert trace["otherData"] == {"run": "a run", "source": spans[0].source}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    begin_s = min(span.start_s for span in spans)
    for span, event in zip(spans, events, strict=True):
        assert event["ts"] == pytest.approx((span.start_s - begin_s) * 1e6, abs=1)
        assert event["dur"] == pytest.approx(span.seconds * 1e6, abs=1)
        assert names[event["tid"]].split(" ")[0] == span.lane == event["cat"]
        assert event["args"]["step"] == span.step
        assert event["args"]["source"] == span.source
    for tid in names:
        rows = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert rows
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(rows))
    assert {e["pid"] for e in trace["traceEvents"]} == {1}


def _perfetto_ns(microseconds: float) -> int:
    """How ui.perfetto.dev reads a time."""
    return math.floor(microseconds * 1000 + 0.5)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_spans_that_touch_do_not_overlap_in_perfetto(seconds: list[float]) -> None:
    """It would drop the second of two, and simulated tasks begin exactly where others end."""
    ends = [0.0, *accumulate(seconds)]
    spans = [Span("optimizer", "main", *times, step=1, source="simulated") for times in pairwise(ends)]
    events = [e for e in json.loads(to_chrome(spans, "a run"))["traceEvents"] if e["ph"] == "X"]
    for earlier, later in pairwise(events):
        assert earlier["tid"] == later["tid"]
        assert _perfetto_ns(earlier["ts"]) + _perfetto_ns(earlier["dur"]) <= _perfetto_ns(later["ts"])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_simulated_step_as_a_trace(name: str) -> None:
    executor = ScriptedExecutor(lambda _: 0.5, step=7)
    run_step(schedule_named(name), executor, StepSpec(num_groups=2, reference=True), Limits())
    trace = json.loads(to_chrome(executor.spans, name))
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert {thread.split(" ")[0] for thread in threads} >= {"main", "decode", "reward"}
    assert "decode (2)" in threads  # two groups decode together
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 18
    assert {(e["args"]["step"], e["args"]["source"]) for e in events} == {(7, "simulated")}
    assert max(e["ts"] + e["dur"] for e in events) == executor.makespan_s * 1e6


def test_no_trace_mixes_measured_and_simulated() -> None:
    spans = [Span("decode", "decode", 0.0, 1.0, 1), Span("decode", "decode", 0.0, 1.0, 1, source="simulated")]
    with pytest.raises(ValueError, match="measured and simulated"):
        to_chrome(spans, "run")


@pytest.mark.parametrize(("start_s", "end_s"), [(1.0, 0.5), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_span_with_impossible_times(start_s: float, end_s: float) -> None:
    with pytest.raises(ValueError, match="span 'decode' runs from"):
        Span("decode", "decode", start_s, end_s, 1)


@pytest.mark.parametrize("line", ["{", "{}", '{"name": "x"}', '{"colour": 1}', "3"])
def test_a_line_that_is_no_span_is_named(line: str) -> None:
    good = to_jsonl([Span("decode", "decode", 0.0, 1.0, 1)])
    with pytest.raises(ValueError, match="line 2 is not a span"):
        from_jsonl(good + line)
