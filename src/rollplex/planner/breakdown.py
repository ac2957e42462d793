"""Where the time of a simulated step goes, second by second, and what a device sends. Pure.

Every moment between the ends of the first and the last step belongs to one phase: to what the busier side (sampling or
passes) does then, else to the other side, else to nobody ("waiting"). A moment of a phase is divided
as the cost model divides that phase (cost.Seconds), and these parts are the causes:

    compute      products, attention
    HBM          weights, cache and activations read and written
    network      collectives, publishing
    launches     kernel launches, the host's part of a decode step
    decode tail  decoding while fewer than half as many groups decode as ever did, whatever it is spent on
    memory       copies and rebuilding that the memory plan exposes
    waiting      nothing runs: the slowest block is waited for
Parts of phases and causes both add up to the step. A decode step is divided as one that reads the prompt of a group
once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache

from rollplex.planner.cost import Seconds, Side, StepCost
from rollplex.planner.parallel import gradient_traffic, sweep_traffic
from rollplex.planner.passes import passes
from rollplex.planner.search import STEPS, judged, run_steps
from rollplex.planner.workload import Arrangement, Workload
from rollplex.schedule.spec import PER_STEP, REFERENCE, Phase, Task
from rollplex.trace import Span

CAUSES: dict[str, tuple[str, ...]] = {
    "compute": ("products", "attention"),
    "HBM": ("weights", "cache", "activations"),
    "network": ("network",),
    "launches": ("launches", "host"),
}
TAIL, MEMORY, WAITING = "decode tail", "memory", "waiting"
_CAUSE_OF = {part: cause for cause, parts in CAUSES.items() for part in parts}
_SAMPLING = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a simulated step, a mean over all but the first. `phases` and `causes` both add up to `seconds`.

    hidden_s: of time in which both sides were busy. traffic: bytes that a device sends in a step, by what for.
    """

    seconds: float
    phases: Mapping[str, float]
    causes: Mapping[str, float]
    hidden_s: float
    traffic: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The cause of most seconds."""
        return max(self.causes, key=lambda cause: self.causes[cause])


def breakdown(workload: Workload, plan: Arrangement, moves_s: float) -> Breakdown:
    """Of the steps that `plan` is judged by (search.py). moves_s: what its memory plan exposes."""
    run, cost = run_steps(workload, plan, traced=True), workload.cost(plan)
    (start_s, end_s), steps = judged(run), STEPS - 1
    phases, causes = defaultdict[str, float](float), defaultdict[str, float](float)
    hidden_s, parts_of = 0.0, cache(lambda phase: _parts(cost, phase))
    for moment in _moments(run.spans, start_s, end_s):
        for phase in moment.phases:
            seconds = moment.seconds / len(moment.phases) / steps
            phases[str(phase)] += seconds
            if phase == Phase.DECODE and moment.tail:
                causes[TAIL] += seconds
            else:
                parts, whole_s = parts_of(phase)
                for cause, part_s in parts:
                    causes[cause] += seconds * part_s / whole_s
        if not moment.phases:
            phases[WAITING] += moment.seconds / steps
            causes[WAITING] += moment.seconds / steps
        hidden_s += moment.seconds * moment.both / steps
    if moves_s:
        phases[MEMORY] += moves_s
        causes[MEMORY] += moves_s
    total = (end_s - start_s) / steps + moves_s
    return Breakdown(total, dict(phases), dict(causes), hidden_s, traffic(cost))


def traffic(cost: StepCost) -> dict[str, float]:
    """Bytes of a step on one device: collectives by side and axis, gradients, weights published, copies to the host."""
    found = defaultdict[str, float](float)
    trained = [p for p in Phase if p not in (*_SAMPLING, Phase.REWARD, *PER_STEP) and cost.side(p) is cost.train]
    sides: list[tuple[str, Side, Sequence[Phase]]] = [
        ("rollout", cost.rollout, _SAMPLING),
        ("training", cost.train, trained),
    ]
    if cost.scoring is not None:
        sides.append(("reference", cost.scoring, REFERENCE))
    for name, side, phases in sides:
        for group, count in Counter(cost.groups).items():
            for phase in phases:
                for one in passes(phase, group, side.counts, cost.algorithm):
                    sent = sweep_traffic(side.counts, side.plan, one.tokens, one.sweeps, ring_tokens=one.ring_tokens)
                    for part in sent:
                        found[f"{name}, {part.axis} parallelism"] += count * part.nbytes / side.plan.data
            if name == "rollout":  # each token of each response goes through the layers once
                for part in sweep_traffic(side.counts, side.plan, sum(n - 1 for n in group.responses)):
                    found[f"{name}, {part.axis} parallelism"] += count * part.nbytes / side.plan.data
    for part in gradient_traffic(cost.train.counts, cost.train.plan, sharded=cost.shard_optimizer):
        found["gradients summed and weights gathered over replicas"] += part.nbytes
    found["weights published to the rollout"] += cost.publish_bytes
    return {name: size for name, size in found.items() if size}


@dataclass(frozen=True, slots=True)
class _Moment:
    seconds: float
    phases: tuple[str, ...]  # of the side that counts; empty: nothing runs
    both: bool
    tail: bool


def _moments(spans: Sequence[Span], start_s: float, end_s: float) -> Iterator[_Moment]:
    """The time from `start_s` to `end_s` cut where anything begins or ends."""
    inside = [s for s in spans if s.end_s > start_s and s.start_s < end_s and s.name != Phase.REWARD]
    sampling_first = _busy(inside, start_s, end_s, True) >= _busy(inside, start_s, end_s, False)
    events = sorted(
        (time_s, change, span.name)
        for span in inside
        for time_s, change in ((max(span.start_s, start_s), 1), (min(span.end_s, end_s), -1))
    )
    most, running = 0, Counter[str]()
    for _, change, name in events:
        running[name] += change
        most = max(most, running[Phase.DECODE])
    running, now_s = Counter(), start_s
    for time_s, change, name in [*events, (end_s, 0, "")]:
        if time_s > now_s:
            active = [phase for phase, count in running.items() if count > 0]
            sides = [tuple(p for p in active if (p in _SAMPLING) is wanted) for wanted in (True, False)]
            first, second = sides if sampling_first else sides[::-1]
            tail = 0 < 2 * running[Phase.DECODE] < most
            yield _Moment(time_s - now_s, first or second, bool(first and second), tail)
            now_s = time_s
        if name:
            running[name] += change


def _busy(spans: Sequence[Span], start_s: float, end_s: float, sampling: bool) -> float:
    """Seconds in which any of one side's spans runs."""
    ends = sorted((max(s.start_s, start_s), min(s.end_s, end_s)) for s in spans if (s.name in _SAMPLING) is sampling)
    total, until = 0.0, start_s
    for begin, end in ends:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _parts(cost: StepCost, phase: str) -> tuple[list[tuple[str, float]], float]:
    """What the cost model makes of a phase of a typical group: seconds with their causes, and their sum. Of decoding a
    step: a typical response may be a single token, which takes none."""
    if phase == Phase.DECODE:
        found = cost.typical_step(0)
    else:
        found = cost.task(Task(Phase(phase)) if phase in PER_STEP else Task(Phase(phase), 0))
    parts = [(_CAUSE_OF[part.name], float(getattr(found, part.name))) for part in fields(Seconds)]
    return [(cause, seconds) for cause, seconds in parts if seconds], found.total
