"""Planned against measured bytes, phase by phase: how far a memory plan can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollplex.memory.plan import MemoryPlan
from rollplex.schedule.spec import Phase

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment of a step. Example: Entry("decode+reward", planned_bytes=3 << 20, measured_bytes=2 << 20)."""

    phases: str
    planned_bytes: int
    measured_bytes: int | None  # None: nothing of the segment ran in the step

    @property
    def measured_over_planned(self) -> float | None:
        """Above 1 the plan promised too little."""
        return None if self.measured_bytes is None else self.measured_bytes / self.planned_bytes


@dataclass(frozen=True, slots=True)
class Ledger:
    """All segments of one step, and its peaks."""

    entries: tuple[Entry, ...]
    planned_peak_bytes: int
    measured_peak_bytes: int
    left_bytes: int  # more held after the step than before

    @property
    def measured_over_planned(self) -> float:
        """Of the peaks."""
        return self.measured_peak_bytes / self.planned_peak_bytes

    def metrics(self) -> dict[str, float]:
        """memory/*, in GiB."""
        return {
            "memory/planned_peak_gib": self.planned_peak_bytes / 2**30,
            "memory/measured_peak_gib": self.measured_peak_bytes / 2**30,
            "memory/left_gib": self.left_bytes / 2**30,
        }

    def lines(self) -> Iterator[str]:
        """A table in MiB."""
        yield f"{'planned':>10}{'measured':>10}{'ratio':>7}  MiB while"
        rows = [*self.entries, Entry("peak of the step", self.planned_peak_bytes, self.measured_peak_bytes)]
        for entry in rows:
            ratio, measured = entry.measured_over_planned, entry.measured_bytes
            found = "-" if measured is None else f"{measured / MIB:.1f}"
            yield (
                f"{entry.planned_bytes / MIB:>10.1f}{found:>10}{'-' if ratio is None else f'{ratio:.2f}':>7}"
                f"  {entry.phases}"
            )


def ledger_of(plan: MemoryPlan, measured: Mapping[Phase, int], peak_bytes: int, left_bytes: int) -> Ledger:
    """measured: most bytes held while each phase ran, of the phases that did; peak_bytes, left_bytes: of the step."""
    entries = []
    for segment, label, planned in zip(plan.timeline.segments, plan.timeline.labels, plan.segment_bytes, strict=True):
        found = [measured[phase] for phase in segment if phase in measured]
        entries.append(Entry(label, planned, max(found, default=None)))
    return Ledger(tuple(entries), plan.peak_bytes, peak_bytes, left_bytes)
