"""Efficiencies of a machine from what it measured: least squares over the spans of a trace.

Unknowns are the fields of `hardware.Efficiency` in logarithms, so that they stay positive; a residual is the logarithm
of predicted over measured seconds, so that short and long spans weigh alike. All spans of a phase together count as
one: what the model gets wrong of a phase is the same in each, and is no better known for being seen often. A weak pull
towards the values that the fit starts from keeps those that the spans say nothing about where they were; a stronger one
is on attention as a part of products, which short prompts do not tell apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rollplex.errors import ConfigError
from rollplex.planner.cost import StepCost
from rollplex.planner.hardware import Hardware, hardware_facts
from rollplex.schedule.scripted import Durations
from rollplex.schedule.spec import PER_STEP, Phase, Task
from rollplex.trace import Span

FREE = ("matmul", "attention", "memory", "kernel_s", "decode_step_s")
# What can be fitted; `decode` only where decode steps are known to reach less than passes (fewer threads, a CPU's small
# products), or it would take over what the others explain.
_FITTED = (*FREE, "decode")
# Weights of the pulls: a field a factor e from its start costs as much as a phase that is 0.5 % off, attention over
# products as much as one that is 5 % off.
_PULL, _RATIO_PULL = 0.005, 0.05
# Spans shorter than this are the clock's and the interpreter's.
SHORTEST_S = 1e-4
# What the spans of runtime/stopwatch.py hold, for all groups of a step, by the names they have there.
_WHOLE_STEP: dict[str, tuple[Phase, ...]] = {
    "prefix": (Phase.PREFILL,),
    "score": (Phase.REF_PREFIX, Phase.REF_RESPONSE),
    "update": (Phase.ACTOR_PREFIX, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD, Phase.OPTIMIZER),
}


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What a traced step consisted of, and what its spans mean by a group.

    rollout_ids: of each group of `cost`. units: rollout ids of the prompts whose passes ran together, as one span under
    the first one's id (runtime/units.py); decoding has a span for each group all the same. Absent: each group alone.
    """

    cost: StepCost
    rollout_ids: tuple[int, ...]
    units: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.rollout_ids) != len(self.cost.groups):
            raise ValueError(f"{len(self.cost.groups)} groups have {len(self.rollout_ids)} rollout ids")
        if strangers := {i for unit in self.units for i in unit} - set(self.rollout_ids):
            raise ValueError(f"units hold rollout ids {sorted(strangers)}, which no group has")

    def places(self, phase: Phase, label: int | None) -> tuple[int, ...]:
        """The groups that a span of `phase` covers; none where it is no group of this step."""
        if label not in self.rollout_ids:
            return ()
        together = next((unit for unit in self.units if unit[0] == label), (label,))
        members = (label,) if phase is Phase.DECODE else together
        return tuple(self.rollout_ids.index(member) for member in members)


@dataclass(frozen=True, slots=True)
class Measured:
    """One span: what it was, how long it took, and what a machine would take for it."""

    phase: str
    seconds: float
    predict: Callable[[Hardware], float]


@dataclass(frozen=True, slots=True)
class Residual:
    """How well a phase is met: seconds of all its spans, and the error of a span."""

    spans: int
    measured_s: float
    predicted_s: float
    typical_error: float  # root mean square of log(predicted / measured)

    @property
    def relative(self) -> float:
        """predicted / measured - 1, over all spans of the phase."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted machine and what is left unexplained, by phase."""

    hardware: Hardware
    residuals: Mapping[str, Residual]
    spans: int

    def facts(self) -> dict[str, Any]:
        """Plain data for JSON; hardware.hardware_from_facts reads its "hardware" back."""
        left = {phase: {**dataclasses.asdict(r), "relative": r.relative} for phase, r in self.residuals.items()}
        return {"source": "measured", "hardware": hardware_facts(self.hardware), "residuals": left, "spans": self.spans}


def measured_spans(spans: Iterable[Span], steps: Mapping[int, TracedStep]) -> list[Measured]:
    """The spans of `steps` (by step number) that a cost model can speak about, each with its prediction.

    Spans named after a phase are one task; "prefix", "score" and "update" are all groups' on one replica. Others
    (prompts, reward) are left out, as are spans that are too short and phases that take the model no time.
    """
    found = []
    seconds = {number: _task_seconds(step.cost) for number, step in steps.items()}
    for span in spans:
        step = steps.get(span.step)
        if step is None or span.source != "measured" or span.seconds < SHORTEST_S:
            continue
        tasks = _tasks(span, step)
        if any(step.cost.task(task).total > 0 for task in tasks):  # publishing within one process moves nothing
            found.append(Measured(span.name, span.seconds, _predictor(seconds[span.step], tasks)))
    return found


def fit(measured: Sequence[Measured], start: Hardware, free: Sequence[str] = FREE) -> Calibration:
    """The efficiencies `free` that make `start` take as long as was measured, in the sense of least squares.

    Raises ConfigError without a span, for an unknown field, or for one that starts at 0 (its logarithm is fitted).
    """
    unknown = [name for name in free if name not in _FITTED]
    if unknown or not free:
        raise ConfigError(f"{unknown or 'nothing'} cannot be fitted; fields: {', '.join(_FITTED)}")
    if not measured:
        raise ConfigError("no span of the trace belongs to a phase of the steps given; trace more steps of the run")
    zero = [name for name in free if getattr(start.efficiency, name) <= 0]
    if zero:
        raise ConfigError(f"efficiency {zero[0]} starts at 0; needed above 0 to be fitted, or leave it out of the fit")
    origin = np.log([getattr(start.efficiency, name) for name in free])
    alike = Counter(m.phase for m in measured)

    def ratio(device: Hardware) -> float:
        return math.log(device.efficiency.attention / device.efficiency.matmul)

    def device(logs: NDArray[np.float64]) -> Hardware:
        values = {name: math.exp(value) for name, value in zip(free, logs, strict=True)}
        if "attention" in values:  # products and a softmax: never faster than products
            values["attention"] = min(values["attention"], values.get("matmul", start.efficiency.matmul))
        return start.reaching(**values)

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        now = device(logs)
        misses = [math.log(m.predict(now) / m.seconds) / math.sqrt(alike[m.phase]) for m in measured]
        return np.concatenate([misses, _PULL * (logs - origin), [_RATIO_PULL * (ratio(now) - ratio(start))]])

    # Fewer threads never reach more: the logarithm of `decode` is at most 0.
    most = [0.0 if name == "decode" else value + 12 for name, value in zip(free, origin, strict=True)]
    best = device(least_squares(errors, origin, bounds=(origin - 12, most)).x)
    return Calibration(best, residuals(measured, best), len(measured))


def residuals(measured: Sequence[Measured], device: Hardware) -> dict[str, Residual]:
    """How well `device` meets each phase: also the report on a setting that the fit has not seen."""
    found = {}
    for phase in dict.fromkeys(m.phase for m in measured):
        pairs = [(m.seconds, m.predict(device)) for m in measured if m.phase == phase]
        misses = [math.log(predicted / seconds) for seconds, predicted in pairs]
        found[phase] = Residual(
            len(pairs),
            sum(seconds for seconds, _ in pairs),
            sum(predicted for _, predicted in pairs),
            math.sqrt(sum(miss * miss for miss in misses) / len(misses)),
        )
    return found


def on(cost: StepCost, device: Hardware) -> StepCost:
    """The same step on another machine, both sides."""
    sides = (dataclasses.replace(side, hardware=device) for side in (cost.train, cost.rollout))
    train, rollout = sides
    return dataclasses.replace(cost, train=train, rollout=rollout)


def _tasks(span: Span, step: TracedStep) -> list[Task]:
    cost = step.cost
    if span.name in _WHOLE_STEP:
        merged = cost.algorithm.prefill_is_actor_prefix  # the actor's prefix is then the engine's, in "prefix"
        phases = [p for p in _WHOLE_STEP[span.name] if not (p is Phase.ACTOR_PREFIX and merged)]
        return [task for phase in phases for task in _all_of(phase, cost)]
    if span.name not in set(Phase) - {Phase.REWARD}:
        return []
    phase = Phase(span.name)
    if phase in PER_STEP:
        return [Task(phase)]
    return [Task(phase, place) for place in step.places(phase, span.group)]


def _all_of(phase: Phase, cost: StepCost) -> list[Task]:
    return [Task(phase)] if phase in PER_STEP else [Task(phase, group) for group in range(len(cost.groups))]


def _predictor(seconds: Callable[[Hardware], Durations], tasks: Sequence[Task]) -> Callable[[Hardware], float]:
    def predict(device: Hardware) -> float:
        of_task = seconds(device)
        return sum(of_task(task) for task in tasks)

    return predict


def _task_seconds(cost: StepCost) -> Callable[[Hardware], Durations]:
    """What the spans of a step share. One machine is kept at a time: the fit moves on."""
    known: dict[Hardware, Durations] = {}

    def seconds(device: Hardware) -> Durations:
        if device not in known:
            known.clear()
            known[device] = on(cost, device).durations()
        return known[device]

    return seconds
