"""What lives in device memory during a step: one record per object, with the ways in which it may be held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollplex.memory.timeline import Timeline
from rollplex.schedule.spec import Phase


class ObjectClass(StrEnum):
    """The four classes of an object (research/rl_systems.md 1)."""

    BOUNDARY = "boundary state"  # produced in one phase and consumed in a later one of the same step
    PERMANENT = "permanent state"  # its content is carried from step to step
    SNAPSHOT = "regenerable snapshot"  # can be made again from something else that is kept
    PHASE_LOCAL = "phase-local"  # nothing reads it after its phase


class Policy(StrEnum):
    """How an object is held where nothing uses it."""

    KEEP = "keep"  # on the device all along
    DISCARD = "discard"  # released after its last use; the next step starts it afresh
    OFFLOAD = "offload"  # in host memory while unused
    RECOMPUTE = "recompute"  # dropped, computed again when needed
    REBUILD = "rebuild"  # views of another resident copy; only what no view can show is built
    STREAM = "stream in chunks"  # in host memory; passes through the device piece by piece


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to hold an object.

    Example: Choice(Policy.OFFLOAD, {Phase.OPTIMIZER: 12 << 30}, restore_s=0.5, detail="pinned host memory")
    """

    policy: Policy
    held: Mapping[Phase, int]  # bytes on the device while each phase runs; absent: none
    restore_s: float = 0.0  # exposed seconds per step that holding it so costs
    detail: str = ""
    host_bytes: int = 0  # host memory that it takes

    def __post_init__(self) -> None:
        if min(self.restore_s, self.host_bytes) < 0 or any(size < 0 for size in self.held.values()):
            raise ValueError(f"{self.policy}: bytes and seconds must not be negative, found {self}")


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """One object. Its first choice is KEEP: what a step without a memory plan does.

    Raises ValueError for a choice that does not hold the object in a phase that uses it.
    """

    name: str
    nbytes: int  # the whole object
    kind: ObjectClass
    uses: tuple[Phase, ...]  # phases that write or read it, in order of time from its producer on
    lasting: bool  # its content, or at least its memory, is carried into the next step
    choices: tuple[Choice, ...]
    formula: str = ""  # how nbytes comes about

    def __post_init__(self) -> None:
        if not self.uses:
            raise ValueError(f"{self.name} is used by no phase")
        if not self.choices or self.choices[0].policy is not Policy.KEEP:
            raise ValueError(f"the first choice of {self.name} must be {Policy.KEEP}, found {self.choices[:1]}")
        for choice in self.choices:
            missing = [str(phase) for phase in self.uses if phase not in choice.held]
            if missing:
                raise ValueError(f"{self.name} under {choice.policy} is absent in {', '.join(missing)}, needed there")

    @property
    def producer(self) -> Phase:
        """The phase that writes it."""
        return self.uses[0]

    @property
    def first_use(self) -> Phase:
        """The first phase that waits for it; its producer when nothing else reads it."""
        return self.uses[min(1, len(self.uses) - 1)]

    @property
    def last_use(self) -> Phase:
        """The phase after which nothing of this step reads it."""
        return self.uses[-1]

    @property
    def keep(self) -> Choice:
        """The choice of a step without a plan."""
        return self.choices[0]


def held_in(record: MemoryRecord, choice: Choice, timeline: Timeline) -> tuple[int, ...]:
    """Bytes of `record` on the device in each segment: in a segment of several phases the largest of theirs."""
    return tuple(max((choice.held.get(phase, 0) for phase in segment), default=0) for segment in timeline.segments)


def peaks(choices: Mapping[str, Choice], records: tuple[MemoryRecord, ...], timeline: Timeline) -> tuple[int, ...]:
    """Bytes of all records together in each segment, each held as `choices` says by its name."""
    columns = [held_in(record, choices[record.name], timeline) for record in records]
    return tuple(sum(column[number] for column in columns) for number in range(len(timeline.segments)))
