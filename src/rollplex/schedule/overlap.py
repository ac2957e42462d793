"""Whether passes run beside decoding: measured, decided, said, and looked at again. Pure.

Overlap must be able to lose: a pass beside decoding slows decoding down, and where it takes more than it hides the
window is closed. The decision never changes what is computed, only where: units and sums are the same with the window
open and closed (schedule `rollplex`), so a run's bits do not depend on its timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Mode = Literal["off", "on", "auto"]

PROBES = 4  # steps of each side in a look; even, so that neither comes first more often
LOOK_AGAIN = 50  # steps from the begin of one look to that of the next
MARGIN = 0.01  # share by which open must be faster: a window that gains nothing costs memory


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step, as far as overlap touches it."""

    open: bool
    tokens: int  # response tokens, the work that both sides of a comparison are divided by
    decode_s: float  # engine iterations
    exposed_s: float  # passes that had the device to themselves, and waits for the window
    hidden_s: float  # decoding with a pass beside it

    @property
    def seconds_per_token(self) -> float:
        """What the window may shorten."""
        return (self.decode_s + self.exposed_s) / max(self.tokens, 1)


@dataclass
class OverlapControl:
    """Opens or closes the window for the next step (`window_open`) from what the steps before took (`record`).

    mode auto: looks, then keeps the side that the look found faster until the next one. A look is PROBES pairs of a
    step with the window open and one with it closed, open first in every other pair, and the median of the pairs'
    ratios decides: what drifts meanwhile (lengths of responses, the machine) cancels, as it would not if new steps of
    one side were held against old ones of the other. The first step, which warms up caches, is in no look.

    Example: OverlapControl("off").window_open is False
    """

    mode: Mode
    reason_closed: str | None = None  # why the window cannot be opened at all; None: it can
    chosen: bool | None = None  # by the last decision
    _since: int = -1  # steps since the present look began; -1: the first step of all
    _look: list[StepSample] = field(default_factory=list)  # the present one's so far
    _seen: list[StepSample] = field(default_factory=list)  # of the last whole look

    @property
    def window_open(self) -> bool:
        """Whether passes may run beside decoding in the next step."""
        if self.reason_closed is not None or self.mode == "off":
            return False
        if self.mode == "on" or self._since < 0:
            return True
        return _opens(self._since) if self._since < 2 * PROBES else bool(self.chosen)

    def record(self, sample: StepSample) -> str | None:
        """Take in a finished step; a sentence for the log when it changed the decision."""
        if self.mode != "auto" or self.reason_closed is not None:
            return None
        self._since += 1
        if 0 < self._since <= 2 * PROBES:
            self._look.append(sample)
        if self._since == LOOK_AGAIN:
            self._since = 0
        if len(self._look) < 2 * PROBES:
            return None
        self._seen, self._look = self._look, []
        before, self.chosen = self.chosen, self._ratio(_seconds) < 1 - MARGIN
        return None if self.chosen == before else self._sentence()

    def metrics(self, sample: StepSample) -> dict[str, float]:
        """overlap/*: whether the window was open, what it hid, and how much decoding slows down beside it."""
        values = {
            "overlap/open": float(sample.open),
            "overlap/hidden_s": sample.hidden_s,
            "overlap/hidden_time_ratio": sample.hidden_s / total
            if (total := sample.hidden_s + sample.exposed_s)
            else 0.0,
        }
        slowdown = self.decode_slowdown()
        return values if slowdown is None else values | {"overlap/decode_slowdown": slowdown}

    def decode_slowdown(self) -> float | None:
        """Decode time per token with the window open over closed, in the last look; None: there was none."""
        return self._ratio(_decode_seconds) if self._seen else None

    def _ratio(self, cost: Callable[[StepSample], float]) -> float:
        """Open over closed: the median over the pairs of the last look."""
        pairs = [self._seen[at : at + 2] for at in range(0, len(self._seen), 2)]
        costs = [(cost(one), cost(other)) if one.open else (cost(other), cost(one)) for one, other in pairs]
        return median(opened / closed if closed else 1.0 for opened, closed in costs)

    def _sentence(self) -> str:
        gain = 1 - self._ratio(_seconds)
        hidden = median(sample.hidden_s for sample in self._seen if sample.open)
        return (
            f"overlap {'on' if self.chosen else 'off'}: with passes beside decoding, decoding takes "
            f"{self._ratio(_decode_seconds):.2f} times as long, {hidden:.3g} s a step are hidden, and rollout and "
            f"update together are {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
        )


def _opens(number: int) -> bool:
    """Whether step `number` of a look has the window open: open, closed, closed, open, and so on."""
    return number % 4 in (0, 3)


def _seconds(sample: StepSample) -> float:
    return sample.seconds_per_token


def _decode_seconds(sample: StepSample) -> float:
    return sample.decode_s / max(sample.tokens, 1)
