"""Spans of one step as a chart for the terminal: a row per lane, a column per slice of time.

Lanes in which one pass runs at a time show its letter; where several run at once, as groups that decode and replicas of
a trainer pool do, bars show how many, of the most that ever did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from rollplex.schedule.spec import Phase
from rollplex.trace import Span

MARKS: dict[str, tuple[str, str]] = {
    Phase.PREFILL: ("p", "cyan"),
    Phase.DECODE: ("-", "blue"),
    Phase.REWARD: ("w", "white"),
    Phase.REF_PREFIX: ("r", "magenta"),
    Phase.ACTOR_PREFIX: ("a", "green"),
    Phase.REF_RESPONSE: ("R", "bright_magenta"),
    Phase.ACTOR_RESPONSE: ("A", "bright_green"),
    Phase.PREFIX_BACKWARD: ("B", "yellow"),
    Phase.OPTIMIZER: ("O", "red"),
    Phase.PUBLISH: ("U", "bright_red"),
}
_LANES = ("decode", "window", "main", "reward")
_BARS, _DIGITS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", " 12345678"


def gantt(spans: Sequence[Span], *, width: int = 100, ascii_only: bool = False) -> Iterator[Text]:
    """Lines of the chart: the rows, a scale in seconds, and what the letters say. Nothing for no spans.

    width: columns of time, each 1 / width of the whole.
    """
    if not spans:
        return
    start_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    slice_s = (end_s - start_s) / width or 1.0
    for lane in sorted({span.lane for span in spans}, key=lambda lane: (_LANES + (lane,)).index(lane)):
        row = Text(f"{lane:8}")
        for cell in _cells([span for span in spans if span.lane == lane], start_s, slice_s, width, ascii_only):
            row.append(*cell)
        yield row
    yield Text(f"{'':8}{'0':{max(1, width - 10)}}{end_s - start_s:>9.3g} s")
    there = {span.name for span in spans}
    legend = Text("        ")
    for phase, (letter, style) in MARKS.items():
        if phase in there:
            legend.append(letter, style)
            legend.append(f" {phase}  ")
    yield legend


def _cells(
    spans: Sequence[Span], start_s: float, slice_s: float, width: int, ascii_only: bool
) -> Iterator[tuple[str, str]]:
    """(character, style) of each slice, from the seconds of each phase in it."""
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        first = min(width - 1, int((span.start_s - start_s) / slice_s))
        last = min(width - 1, int((span.end_s - start_s) / slice_s))
        for index in range(first, last + 1):
            low, high = start_s + index * slice_s, start_s + (index + 1) * slice_s
            inside = max(0.0, min(span.end_s, high) - max(span.start_s, low))
            shares[index][span.name] = shares[index].get(span.name, 0.0) + inside / slice_s
    most = max(sum(share.values()) for share in shares)
    for share in shares:
        running = sum(share.values())
        if not share or running < 0.05:
            yield " ", ""
            continue
        letter, style = MARKS.get(max(share, key=lambda name: share[name]), ("?", ""))
        if most > 1.5:
            letter = (_DIGITS if ascii_only else _BARS)[max(1, round(8 * running / most))]
        yield letter, style
