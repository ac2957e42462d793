"""The phases of a step in order, cut into segments: phases of one segment run at the same time and share the device.

Between two segments objects may be moved; inside one, everything that any of its phases uses is resident. A step ends
where the next begins, so that what lasts from step to step stays resident around the end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rollplex.errors import ConfigError
from rollplex.schedule.spec import Phase


@dataclass(frozen=True, slots=True)
class Timeline:
    """Segments in the order in which they run; each phase is in exactly one.

    Example: Timeline("serial", ((Phase.PREFILL,), (Phase.DECODE,), ...))
    """

    name: str
    segments: tuple[tuple[Phase, ...], ...]

    def __post_init__(self) -> None:
        phases = [phase for segment in self.segments for phase in segment]
        if sorted(phases) != sorted(Phase) or not all(self.segments):
            raise ValueError(f"timeline {self.name!r} needs every phase in exactly one segment, found {phases}")

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the segments. Example: ("prefill", "decode+reward+ref_prefix+actor_prefix", ...)."""
        return tuple("+".join(segment) for segment in self.segments)

    def position(self, phase: Phase) -> int:
        """Number of the segment that runs `phase`."""
        return next(number for number, segment in enumerate(self.segments) if phase in segment)

    def positions(self, phases: Collection[Phase]) -> frozenset[int]:
        """Numbers of the segments that run any of `phases`."""
        return frozenset(self.position(phase) for phase in phases)

    def span(self, phases: Collection[Phase]) -> frozenset[int]:
        """All segments from the first to the last that runs any of `phases`."""
        positions = self.positions(phases)
        return frozenset(range(min(positions), max(positions) + 1))

    def visits(self, phases: Collection[Phase], *, lasting: bool) -> int:
        """How often an object that is resident in `phases` alone has to be brought in during one step.

        Neighbouring segments count as one visit; for a lasting object the last segment and the first are neighbours.
        """
        here = self.positions(phases)
        count = len(self.segments)
        if lasting and len(here) == count:
            return 0
        before = [position - 1 if position or not lasting else count - 1 for position in here]
        return sum(position not in here for position in before)


def _each(*phases: Phase) -> tuple[tuple[Phase, ...], ...]:
    return tuple((phase,) for phase in phases)


_BEGIN = _each(Phase.PREFILL)
_END = _each(Phase.OPTIMIZER, Phase.PUBLISH)

# Phase after phase: today's colocated frameworks.
SERIAL = Timeline("serial", _each(*Phase))
# Both prefixes run in the decode window.
ROLLPLEX = Timeline(
    "rollplex",
    (
        *_BEGIN,
        (Phase.DECODE, Phase.REWARD, Phase.REF_PREFIX, Phase.ACTOR_PREFIX),
        *_each(Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD),
        *_END,
    ),
)
# Complete groups are trained on while others still decode.
STREAM = Timeline("stream", (*_BEGIN, tuple(Phase)[1:-2], *_END))
# The same with the window closed: when all are decoded, one group to its prefix backward after another. The next one's
# reference passes so find the gradients of those before.
STREAM_CLOSED = Timeline("stream, window closed", (*_BEGIN, (Phase.DECODE,), tuple(Phase)[2:-2], *_END))
TIMELINES = {timeline.name: timeline for timeline in (SERIAL, ROLLPLEX, STREAM)}
# Of the same schedules in a step without passes beside decoding.
_CLOSED = {"serial": SERIAL, "rollplex": SERIAL, "stream": STREAM_CLOSED}


def timeline_of(schedule: str, *, overlapped: bool) -> Timeline:
    """Which phases run at once. overlapped: passes may run beside decoding.

    Raises ConfigError for a schedule of which that is not known: one of its own class, or with pools.
    """
    if schedule not in TIMELINES:
        raise ConfigError(
            f"schedule.name is {schedule!r}: which of its phases run at once is not known, so its memory cannot be "
            f"counted; needed one of {', '.join(TIMELINES)}"
        )
    return (TIMELINES if overlapped else _CLOSED)[schedule]
