"""What ran when: spans, measured or simulated, as JSON lines and as a trace that Perfetto and Chrome show.

Open a trace file at https://ui.perfetto.dev or chrome://tracing. One process per run, one thread per lane; where spans
of a lane overlap, such as groups that decode together, the lane has further threads, so that no span hides another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

MICROSECONDS = 1e6  # the unit of the trace format


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran in one lane.

    Example: Span("decode", "decode", 0.5, 2.25, step=3, group=0)
    """

    name: str  # phase
    lane: str
    start_s: float  # seconds: since 1970 when measured, on the simulated clock otherwise
    end_s: float
    step: int
    group: int | None = None  # its place in the step, or its rollout id when measured; None: of the whole step
    source: Literal["measured", "simulated"] = "measured"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s <= self.end_s < math.inf):
            raise ValueError(f"span {self.name!r} runs from {self.start_s} to {self.end_s} s")
        if self.source not in ("measured", "simulated"):
            raise ValueError(f"span {self.name!r} has source {self.source!r}, needed measured or simulated")

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


def to_jsonl(spans: Iterable[Span]) -> str:
    """One line per span, all fields."""
    return "".join(json.dumps(asdict(span)) + "\n" for span in spans)


def from_jsonl(text: str) -> list[Span]:
    """The spans of `to_jsonl`. Raises ValueError with the number of a line that is none."""
    spans = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            spans.append(Span(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not a span: {error}") from error
    return spans


def to_chrome(spans: Sequence[Span], run: str) -> str:
    """A JSON object in Chrome's trace format, times in whole microseconds from the first span's start.

    run: name of the process. All spans must come from one source: a simulated time beside a measured one would be read
    as one of its kind. Raises ValueError for a mixture.
    """
    sources = sorted({span.source for span in spans})
    if len(sources) > 1:
        raise ValueError("the spans are measured and simulated; write one trace for each")
    start_s = min((span.start_s for span in spans), default=0.0)
    threads = _threads(spans)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": run}}]
    for tid, (lane, number) in enumerate(sorted(set(threads)), start=1):
        label = lane if number == 0 else f"{lane} ({number + 1})"
        events += [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": label}},
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}},
        ]
    tids = {thread: tid for tid, thread in enumerate(sorted(set(threads)), start=1)}
    events += [
        {
            "ph": "X",
            "pid": 1,
            "tid": tids[thread],
            "name": span.name if span.group is None else f"{span.name} {span.group}",
            "cat": span.lane,
            "ts": _whole_us(span.start_s - start_s),
            "dur": _whole_us(span.end_s - start_s) - _whole_us(span.start_s - start_s),
            "args": {"phase": span.name, "step": span.step, "group": span.group, "source": span.source},
        }
        for span, thread in zip(spans, threads, strict=True)
    ]
    other = {"run": run, "source": sources[0] if sources else None}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, indent=1) + "\n"


def _whole_us(seconds: float) -> int:
    """Perfetto takes begin and length of a span to nanoseconds, each by itself, and drops a span that then overlaps
    another of its thread: of two that touch, with fractions, every fourth."""
    return round(seconds * MICROSECONDS)


def _threads(spans: Sequence[Span]) -> list[tuple[str, int]]:
    """(lane, row) of each span: the first row of its lane in which no earlier span still runs."""
    free_at: dict[str, list[float]] = {}
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, spans[i].end_s)):
        span, ends = spans[index], free_at.setdefault(spans[index].lane, [])
        row = next((number for number, end_s in enumerate(ends) if end_s <= span.start_s), len(ends))
        ends[row : row + 1] = [span.end_s]
        rows[index] = row
    return [(span.lane, row) for span, row in zip(spans, rows, strict=True)]
