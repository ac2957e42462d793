"""Whether passes run beside decoding: measured, decided, said, and looked at again. Pure.

Overlap must be able to lose: a pass beside decoding slows decoding down, and where it takes more than it hides the
window is closed. The decision never changes what is computed, only where: units and sums are the same with the window
open and closed (schedule `rollplex`), so a run's bits do not depend on its timing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Mode = Literal["off", "on", "auto"]

PROBES = 3  # steps with the window open, and as many with it closed, before the first decision
KEPT = 5  # newest samples per side that a decision looks at: those of one look are most of them
LOOK_AGAIN = 50  # steps after which the other side is tried for PROBES steps once more
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

    mode auto: alternates until both sides have PROBES samples (the first step, which also warms up caches, is not one),
    then takes the faster side by medians, and tries the other one for PROBES steps every LOOK_AGAIN steps.

    Example: OverlapControl("off").window_open is False
    """

    mode: Mode
    reason_closed: str | None = None  # why the window cannot be opened at all; None: it can
    steps: int = 0
    chosen: bool | None = None  # by the last decision
    _samples: dict[bool, deque[StepSample]] = field(
        default_factory=lambda: {True: deque(maxlen=KEPT), False: deque(maxlen=KEPT)}
    )

    @property
    def window_open(self) -> bool:
        """Whether passes may run beside decoding in the next step."""
        if self.reason_closed is not None or self.mode == "off":
            return False
        if self.mode == "on":
            return True
        if self.chosen is None:
            return len(self._samples[True]) <= len(self._samples[False])
        return self.chosen != (self.steps % LOOK_AGAIN < PROBES)

    def record(self, sample: StepSample) -> str | None:
        """Take in a finished step; a sentence for the log when it changed the decision."""
        self.steps += 1
        if self.steps == 1 and self.mode == "auto":
            return None
        self._samples[sample.open].append(sample)
        if self.mode != "auto" or self.reason_closed is not None or not self._probed():
            return None
        before, self.chosen = self.chosen, self._open_is_faster()
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
        """Decode time per token with the window open over closed, medians; None: one side was not seen."""
        rates = [[s.decode_s / max(s.tokens, 1) for s in self._samples[side]] for side in (True, False)]
        if not all(rates) or not median(rates[1]):
            return None
        return median(rates[0]) / median(rates[1])

    def _probed(self) -> bool:
        return min(len(samples) for samples in self._samples.values()) >= PROBES

    def _cost(self, side: bool) -> float:
        return median(sample.seconds_per_token for sample in self._samples[side])

    def _open_is_faster(self) -> bool:
        return self._cost(True) < (1 - MARGIN) * self._cost(False)

    def _sentence(self) -> str:
        gain = 1 - self._cost(True) / self._cost(False) if self._cost(False) else 0.0
        hidden = median(sample.hidden_s for sample in self._samples[True])
        return (
            f"overlap {'on' if self.chosen else 'off'}: with passes beside decoding, decoding takes "
            f"{self.decode_slowdown() or 1.0:.2f} times as long, {hidden:.3g} s a step are hidden, and rollout and "
            f"update together are {abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
        )
