"""Which object is held how, so that every segment of a step fits under a cap and the least time is exposed.

A mixed-integer linear program, solved by HiGHS through SciPy: one binary x[r, c] for each choice c of each record r;
    minimise    sum restore_s[r, c] x[r, c]           (among equal times: fewest records that are not simply kept)
    subject to  sum_c x[r, c] = 1                     for each record
                sum held[r, c, s] x[r, c] <= cap      for each segment s
The solver works in floating point with tolerances, so its answers are checked in whole bytes: one that is over the cap
after all is excluded and the program solved again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from rollplex.errors import ConfigError, StateError
from rollplex.memory.records import Choice, MemoryRecord, Policy, held_in, peaks
from rollplex.memory.timeline import Timeline

# Time is counted in microseconds; each record that is not simply kept weighs as much as one, which breaks ties.
_PER_SECOND = 1e6
# Relative slack that the solver's tolerances need; what it lets through by mistake is caught in whole bytes.
_SLACK = 1e-7
_SOLVER_DEADLINE_S = 60.0
_OPTIMAL, _INFEASIBLE = 0, 2


@dataclass(frozen=True, slots=True)
class SmallestCap:
    """The least peak that any plan reaches, in bytes, and the segments at that peak."""

    cap_bytes: int
    binding: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A choice for every record, and what follows from it."""

    timeline: Timeline
    records: tuple[MemoryRecord, ...]
    choices: Mapping[str, Choice]  # by record name
    segment_bytes: tuple[int, ...]  # all records together, by segment

    @property
    def peak_bytes(self) -> int:
        """The fullest segment."""
        return max(self.segment_bytes, default=0)

    @property
    def fullest(self) -> int:
        """Number of that segment."""
        return self.segment_bytes.index(self.peak_bytes)

    @property
    def fullest_phases(self) -> str:
        """What runs in it."""
        return self.timeline.labels[self.fullest]

    @property
    def exposed_s(self) -> float:
        """Seconds per step that the plan adds to one in which everything is kept."""
        return sum(choice.restore_s for choice in self.choices.values())

    def replaced(self, name: str, choice: Choice) -> MemoryPlan:
        """The same plan but for one record."""
        return _evaluated({**self.choices, name: choice}, self.records, self.timeline)


def unplanned(records: Sequence[MemoryRecord], timeline: Timeline) -> MemoryPlan:
    """Every record simply kept: naive co-location."""
    return _evaluated({record.name: record.keep for record in records}, tuple(records), timeline)


def plan_memory(records: Sequence[MemoryRecord], timeline: Timeline, cap_bytes: int) -> MemoryPlan:
    """The plan of least exposed time whose peak is at most `cap_bytes`.

    Every record that is not kept is needed: with any one of them kept instead, the plan is over the cap.
    Raises ConfigError when no plan fits: it names the smallest cap that works and the phases that bind there.
    """
    plan = plan_under(records, timeline, cap_bytes)
    if plan is None:
        least = smallest_cap(records, timeline)
        raise ConfigError(
            f"no memory plan fits into {_gib(cap_bytes)} GiB: the smallest cap that works is "
            f"{gib_above(least.cap_bytes)} GiB ({least.cap_bytes} bytes), where {' and '.join(least.binding)} "
            f"{'binds' if len(least.binding) == 1 else 'bind'}; raise memory.cap_gib, lower train.micro_batch_tokens "
            "or rollout.prompts_per_step, or spread over more devices"
        )
    return plan


def plan_under(records: Sequence[MemoryRecord], timeline: Timeline, cap_bytes: int) -> MemoryPlan | None:
    """As `plan_memory`; None when no plan fits, for a search that asks of many."""
    held = tuple(records)
    choices = _solve(held, timeline, cap_bytes, _exposed_cost(held))
    return None if choices is None else _evaluated(choices, held, timeline)


def smallest_cap(records: Sequence[MemoryRecord], timeline: Timeline) -> SmallestCap:
    """The least peak of any plan, exact to the byte."""
    held = tuple(records)
    best = unplanned(held, timeline)
    upper = best.peak_bytes
    while True:
        choices = _solve(held, timeline, upper, None)
        if choices is None:
            break
        found = _evaluated(choices, held, timeline)
        if found.peak_bytes > upper:
            raise StateError(f"a plan of {found.peak_bytes} bytes came back under a cap of {upper}")
        best, upper = found, found.peak_bytes - 1
        if upper < 0:
            break
    labels = zip(timeline.labels, best.segment_bytes, strict=True)
    return SmallestCap(best.peak_bytes, tuple(label for label, size in labels if size == best.peak_bytes))


def _exposed_cost(records: tuple[MemoryRecord, ...]) -> list[float]:
    return [
        choice.restore_s * _PER_SECOND + (choice.policy is not Policy.KEEP)
        for record in records
        for choice in record.choices
    ]


def _solve(
    records: tuple[MemoryRecord, ...], timeline: Timeline, cap_bytes: int, cost: list[float] | None
) -> dict[str, Choice] | None:
    """The cheapest choices under the cap; `cost` None: those of the least peak. None: there are none."""
    pairs = [(row, choice) for row, record in enumerate(records) for choice in record.choices]
    if not pairs:
        return {} if cap_bytes >= 0 else None
    unit = float(max(1, cap_bytes))
    held_SC = np.array([held_in(records[row], choice, timeline) for row, choice in pairs], dtype=float).T / unit
    one_RC = np.zeros((len(records), len(pairs)))
    for column, (row, _) in enumerate(pairs):
        one_RC[row, column] = 1.0
    # The last variable is the peak: minimised where there is no cost.
    num = len(pairs)
    constraints = [
        LinearConstraint(np.hstack([one_RC, np.zeros((len(records), 1))]), 1.0, 1.0),
        LinearConstraint(np.hstack([held_SC, -np.ones((held_SC.shape[0], 1))]), -np.inf, 0.0),
    ]
    objective = np.array([0.0] * num + [1.0]) if cost is None else np.array([*cost, 0.0])
    while True:
        answer = milp(
            objective,
            integrality=[1] * num + [0],
            bounds=Bounds(np.zeros(num + 1), np.array([1.0] * num + [1.0 + _SLACK])),
            constraints=constraints,
            options={"mip_rel_gap": 0.0, "time_limit": _SOLVER_DEADLINE_S},
        )
        if answer.status == _INFEASIBLE:
            return None
        if answer.status != _OPTIMAL:
            raise StateError(f"the memory plan was not solved within {_SOLVER_DEADLINE_S:g} s: {answer.message}")
        picked = [column for column in range(num) if answer.x[column] > 0.5]
        choices = {records[pairs[column][0]].name: pairs[column][1] for column in picked}
        if max(peaks(choices, records, timeline)) <= cap_bytes:
            return choices
        excluded = np.zeros(num + 1)
        excluded[picked] = 1.0
        constraints.append(LinearConstraint(excluded, -np.inf, len(picked) - 1.0))


def _evaluated(choices: Mapping[str, Choice], records: tuple[MemoryRecord, ...], timeline: Timeline) -> MemoryPlan:
    return MemoryPlan(timeline, records, choices, peaks(choices, records, timeline))


def gib_above(nbytes: int) -> str:
    """A cap that is enough for `nbytes`, in GiB: rounded up, so that it works when it is set."""
    if not nbytes:
        return "0"
    gib = nbytes / 2**30
    places = 2 if gib >= 1 else 2 - floor(log10(gib))  # three digits at least
    return f"{ceil(gib * 10**places) / 10**places:.{places}f}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes >= 2**30 else f"{nbytes / 2**30:.3g}"
