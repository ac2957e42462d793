"""What decoding and passes cost each other when they run at once, from spans of real runs. Pure.

Both factors are measured over predicted seconds, with the bias taken out that the same phase has where it ran alone:

    window   of passes that decoding covers for most of their time
    decode   over the time in which a pass runs beside: its spans last D, of which O has a pass beside it, and d alone
             by the cost model, so that O seconds do the work of d - (D - O)
Threads of their own count too: a pass on one of two cores takes up to twice as long as on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from rollplex.planner.calibrate import Residual, TracedStep, measured_spans, on
from rollplex.planner.hardware import Hardware
from rollplex.schedule.spec import Phase
from rollplex.schedule.step import Lane
from rollplex.trace import Span

# Of a pass in the window: decoding covers this much of it, or it says nothing about co-running.
_COVERED = 0.5
# Of decoding: with less of it beside passes, the factor would be the error of the prediction.
_SEEN = 0.15


@dataclass(frozen=True, slots=True)
class Together:
    """Seconds of some runs, as above; sums of runs add up. `window_alone_s` and `alone_s` are the predictions."""

    window_s: float = 0.0
    window_alone_s: float = 0.0
    decode_s: float = 0.0
    beside_s: float = 0.0  # O
    alone_s: float = 0.0

    def __add__(self, other: Together) -> Together:
        return Together(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Together)))

    @property
    def window(self) -> float | None:
        """How many times as long passes take beside decoding, at least 1; None: no trace has any."""
        return max(1.0, self.window_s / self.window_alone_s) if self.window_alone_s else None

    @property
    def decode(self) -> float | None:
        """How many times as long decoding takes beside passes, at least 1; None: no trace has enough of it."""
        if self.beside_s < _SEEN * self.decode_s or not self.decode_s:
            return None
        work_s = self.alone_s - (self.decode_s - self.beside_s)
        return max(1.0, self.beside_s / max(work_s, self.beside_s / 10))


def alone(spans: Sequence[Span]) -> list[Span]:
    """Spans that shared the device with nothing: no pass of the window's lane ran meanwhile."""
    window = [span for span in spans if span.lane == Lane.WINDOW]
    return [span for span in spans if span.lane != Lane.WINDOW and not _covered_s(span, window)]


def together(
    spans: Sequence[Span], steps: Mapping[int, TracedStep], device: Hardware, left: Mapping[str, Residual]
) -> Together:
    """The spans of one run that had company. left: how well `device` meets the others (calibrate.residuals)."""
    steps = {number: TracedStep(on(step.cost, device), step.rollout_ids, step.units) for number, step in steps.items()}
    window = [span for span in spans if span.lane == Lane.WINDOW]
    decoding = [span for span in spans if span.name == Phase.DECODE]

    def predicted_s(span: Span) -> float | None:
        found = measured_spans([span], steps)
        bias = left[span.name].relative + 1.0 if span.name in left else 1.0
        return found[0].predict(device) / bias if found else None

    total = Together()
    for span in window:
        seconds = predicted_s(span)
        if seconds is not None and _covered_s(span, decoding) >= _COVERED * span.seconds:
            total += Together(window_s=span.seconds, window_alone_s=seconds)
    for span in decoding:
        seconds, beside_s = predicted_s(span), _covered_s(span, window)
        if seconds is not None and beside_s:
            total += Together(decode_s=span.seconds, beside_s=beside_s, alone_s=seconds)
    return total


def _covered_s(span: Span, others: Sequence[Span]) -> float:
    """Seconds of `span` in which any of `others` runs."""
    covered, until = 0.0, span.start_s
    for other in sorted(others, key=lambda other: other.start_s):
        begin, end = max(other.start_s, until), min(other.end_s, span.end_s)
        if end > begin:
            covered += end - begin
            until = end
    return covered
