"""Which arrangement of devices steps fastest under the memory cap: bounded in closed form, simulated, ranked. Pure.

Arrangements are taken in the order of their bounds (step_bound.py). One whose bound is over what the best few, and the
best of its own schedule, were found to take is neither checked nor simulated: it can be in no answer. What is left is
held under the cap (fit.py) and run in virtual time; the seconds that its memory plan exposes are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.arrangements import Considered, Degrees, arrangements
from rollplex.planner.fit import Fit, Need, Part, parts
from rollplex.planner.simulate import Simulation
from rollplex.planner.step_bound import StepBound
from rollplex.planner.workload import COLOCATED, HYBRID, SIMULATED, Arrangement, Assumptions, Workload

GIB = 1 << 30
# The first of these steps fills what overlaps from step to step; the mean is over the others.
STEPS = 3
# A bound takes the line of a decode step at other rows than the simulation: this is for the curvature between them.
_SLACK = 0.97

Bounded = tuple[float, int]
"""A bound in seconds, and the number of the arrangement it is of."""

Watched = Callable[[Sequence[Bounded]], Iterable[Bounded]]
"""Gives what it gets, one by one, for whoever shows how far a search is: it can take minutes."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """An arrangement that fits, and how fast it steps. seconds = simulated_s + moves_s."""

    plan: Arrangement
    bound_s: float
    simulated_s: float
    fits: tuple[Fit, ...]

    @property
    def moves_s(self) -> float:
        """Exposed by the memory plan: copies to and from the host, rebuilding, recomputing. The slower pool counts."""
        return max(fit.plan.exposed_s for fit in self.fits)

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.simulated_s + self.moves_s


@dataclass(frozen=True)
class Search:
    """What was asked, what was looked at, and the answer: on-policy arrangements, fastest first.

    best: the fastest few of all. by_schedule: the fastest of each schedule that fits anywhere, `async` too.
    missing: why the other schedules are not among them.
    """

    workload: Workload
    devices: int
    cap_bytes: int
    considered: int
    left_out: Mapping[str, int]
    best: tuple[Ranked, ...]
    by_schedule: Mapping[str, Ranked]
    missing: Mapping[str, str]


def cap_of(config: Config, assumed: Assumptions) -> int:
    """Bytes that a device may hold: memory.cap_gib, or all of the sheet's. Raises ConfigError for more than it has.

    A sheet's "80 GB" are read as 80 GiB where a recipe says so: vendors mean that by it.
    """
    cap, device = config.memory.cap_gib, assumed.hardware
    if cap is None:
        return int(device.memory_bytes)
    if cap > device.memory_bytes / 1e9:
        raise ConfigError(
            f"memory.cap_gib is {cap:g}, and --hardware {device.name} has {device.memory_bytes / 1e9:g} GB a device; "
            "lower memory.cap_gib, or leave it out (memory.cap_gib=null) to plan with all that it has"
        )
    return int(cap * GIB)


def on_devices(config: Config, devices: int) -> Config:
    """`config` for that many devices, its own degrees put aside."""
    if devices < 1:
        raise ConfigError(f"--gpus is {devices}, needed 1 or more")
    memory = config.memory.model_copy(update={"devices": devices})
    sharing = config.sharing.model_copy(update={"train_tp": 1, "rollout_tp": 1})
    return config.model_copy(update={"memory": memory, "sharing": sharing})


def degrees_of(workload: Workload) -> Degrees:
    """The degrees that its model, prompts and recipe leave to choose from."""
    shape = workload.shape
    node = workload.assumed.hardware.devices_per_node
    return Degrees(workload.counts, shape.prompt_tokens, shape.sequence_parallel, shape.reference, node)


def to_consider(workload: Workload, devices: int) -> Considered:
    """Arrangements of the recipe's step, but for those whose schedule cannot run it."""
    found = arrangements(degrees_of(workload), workload.shape.prompts, devices)
    usable = [name for name in SIMULATED if workload.refusal(name) is None]
    plans = [plan for plan in found.plans if plan.schedule in usable]
    if len(plans) < len(found.plans):
        found.leave_out("whose schedule cannot run the step", len(found.plans) - len(plans))
    return Considered(plans, found.left_out)


def search(config: Config, devices: int, assumed: Assumptions, *, keep: int = 4, watched: Watched = iter) -> Search:
    """The fastest `keep` arrangements of the recipe's step on `devices` devices.

    Raises ConfigError where nothing divides; `best` is empty where nothing fits (remedies.py says what would help).
    """
    workload = Workload(on_devices(config, devices), assumed)
    cap = cap_of(config, assumed)
    shape = workload.shape
    found = to_consider(workload, devices)
    if not found.plans:
        raise ConfigError(
            f"--gpus {devices}: no arrangement divides the model and {shape.prompts} prompts "
            f"({_counted(found.left_out)}); change --gpus or rollout.prompts_per_step"
        )
    return _Search(workload, cap, keep, found).run(devices, watched)


class _Search:
    def __init__(self, workload: Workload, cap: int, keep: int, found: Considered):
        self.workload, self.cap, self.keep, self.found = workload, cap, keep, found
        self.fitting = Fitting(workload, cap)
        self.best: list[Ranked] = []
        self.by_schedule: dict[str, Ranked] = {}

    def run(self, devices: int, watched: Watched) -> Search:
        """All of them in the order of their bounds."""
        considered = len(self.found.plans) + sum(self.found.left_out.values())
        bound = StepBound(self.workload, range(1, STEPS))
        ordered = sorted(((bound.seconds(plan) * _SLACK, n) for n, plan in enumerate(self.found.plans)))
        for bound_s, number in watched(ordered):
            plan = self.found.plans[number]
            if bound_s >= self._worth(plan):
                self.found.leave_out("ruled out by their bound")
                continue
            fits = self.fitting.of(plan)
            if fits is None:
                self.found.leave_out("that do not fit")
                continue
            self._take(Ranked(plan, bound_s / _SLACK, step_seconds(self.workload, plan), fits))
        by_schedule = {name: self.by_schedule[name] for name in SIMULATED if name in self.by_schedule}
        best = tuple(self.best[: self.keep])
        return Search(
            self.workload, devices, self.cap, considered, self.found.left_out, best, by_schedule, self._missing(devices)
        )

    def _missing(self, devices: int) -> dict[str, str]:
        """Why a schedule has no arrangement in the answer."""
        there, prompts = {plan.schedule for plan in self.found.plans}, self.workload.shape.prompts
        reasons = {}
        for name in SIMULATED:
            refusal = self.workload.refusal(name)
            if name in there:
                reasons[name] = f"fits nowhere under {self.cap / GIB:.2f} GiB a device"
            elif name not in COLOCATED and devices < 2:
                reasons[name] = f"{name} takes 2 devices or more, found --gpus {devices}"
            elif refusal is not None:
                reasons[name] = refusal
            elif name in COLOCATED:
                reasons[name] = (
                    f"no training replicas on {devices} devices divide {prompts} prompts (rollout.prompts_per_step)"
                )
            elif name == HYBRID:
                reasons[name] = f"no blocks beside a reference divide {prompts} prompts and share it evenly"
            else:
                reasons[name] = f"every split has more replicas than {prompts} prompts (rollout.prompts_per_step)"
        return {name: reason for name, reason in reasons.items() if name not in self.by_schedule}

    def _worth(self, plan: Arrangement) -> float:
        """A plan must be faster than this to be in the answer."""
        own = self.by_schedule.get(plan.schedule)
        if own is None:
            return math.inf
        few = self.best[self.keep - 1].seconds if len(self.best) >= self.keep else math.inf
        return max(own.seconds, few) if plan.on_policy else own.seconds

    def _take(self, ranked: Ranked) -> None:
        schedule = ranked.plan.schedule
        self.found.leave_out("simulated")
        if schedule not in self.by_schedule or ranked.seconds < self.by_schedule[schedule].seconds:
            self.by_schedule[schedule] = ranked
        if ranked.plan.on_policy:
            self.best = sorted([*self.best, ranked], key=lambda r: r.seconds)[: self.keep]


class Fitting:
    """How arrangements fit under a cap; what they share is counted and planned once."""

    def __init__(self, workload: Workload, cap: int):
        self._workload, self._cap = workload, cap
        self._needs: dict[object, Need] = {}
        self._fits: dict[object, Fit | None] = {}

    def needs(self, plan: Arrangement) -> tuple[Need, ...]:
        """What each kind of its devices would hold."""
        return tuple(map(self._need, parts(plan)))

    def of(self, plan: Arrangement) -> tuple[Fit, ...] | None:
        """A fit for each kind of its devices; None where one has none."""
        found = []
        for part in parts(plan):
            fit = self._fit(part)
            if fit is None:
                return None
            found.append(fit)
        return tuple(found)

    def _need(self, part: Part) -> Need:
        if part.key not in self._needs:
            workload = self._workload
            self._needs[part.key] = part.need(workload.shape, workload.counts, workload.assumed.hardware)
        return self._needs[part.key]

    def _fit(self, part: Part) -> Fit | None:
        if part.key not in self._fits:
            need = self._need(part)
            plan = need.plan(self._cap)
            self._fits[part.key] = None if plan is None else Fit(part.where, plan)
        return self._fits[part.key]


def step_seconds(workload: Workload, plan: Arrangement) -> float:
    """Mean seconds of a step, the first of STEPS left out."""
    start_s, end_s = judged(run_steps(workload, plan))
    return (end_s - start_s) / (STEPS - 1)


def run_steps(workload: Workload, plan: Arrangement, *, traced: bool = False) -> Simulation:
    """The steps that a plan is judged by; one more where steps overlap, so that the last has a next one beside it."""
    count = STEPS if plan.on_policy else STEPS + 1
    return workload.on(plan).simulate(count, traced=range(count) if traced else ())


def judged(run: Simulation) -> tuple[float, float]:
    """From the end of the first step to that of the last one that counts, on the clock of the run."""
    return run.steps[0].end_s, run.steps[STEPS - 1].end_s


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none at all"
