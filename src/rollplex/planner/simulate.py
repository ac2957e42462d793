"""Whole runs in virtual time: real schedules, sampled response lengths; what came of it as times and as spans. Pure.

Devices are laid out in one of two ways:
    blocks  each one training replica with the engines on its devices, sampling and training its own share of the
            groups (serial, rollplex, stream; hybrid: with its share of the reference's devices). Blocks wait for each
            other in OPTIMIZER only, so each runs by itself and a step takes as long as its slowest block
    pools   engines that sample and replicas that train all groups (disaggregated, rolloutpipe, async)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rollplex.errors import ConfigError
from rollplex.planner.engine import Engine, StepTable
from rollplex.planner.lengths import Lengths
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.virtual import LaneUse, VirtualExecutor
from rollplex.schedule.pools import Disaggregated, RolloutPipe
from rollplex.schedule.run import Async, InTurn, RunSchedule, run_steps
from rollplex.schedule.spec import Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Limits, Schedule, run_step
from rollplex.trace import Span

PhaseSeconds = Callable[[Phase, GroupLoad | None], float]
"""Seconds of a phase of a group on its devices alone, or of the whole step (None): pass_times.py."""


@dataclass(frozen=True)
class Feed:
    """What the steps are fed: prompts in turn, `generations` responses each, with lengths drawn anew in every step.

    The lengths of a step depend on the seed and its number alone; those of a group not on the groups after it.
    """

    prompts: Sequence[Prompt]
    generations: int
    lengths: Lengths
    seed: int = 0

    def groups(self, step: int, count: int) -> list[GroupLoad]:
        """The groups of one step."""
        drawn = self.lengths.draw(count * self.generations, np.random.default_rng((self.seed, step))).tolist()
        prompts, size = self.prompts, self.generations
        first = step * count
        return [
            GroupLoad(prompts[(first + g) % len(prompts)], tuple(drawn[g * size : (g + 1) * size]))
            for g in range(count)
        ]


@dataclass(frozen=True)
class Layout:
    """Devices as the simulation sees them.

    blocks: of one training replica each, with its engines; pools: leave it at 1. engines: of a block, or of the rollout
    pool. trainers: replicas of the trainer pool. places, shared_prompts, scatter: engine.py. contention: virtual.py.
    limits: of a block's lanes and memory. window_apart: what runs in the window has devices of its own.
    """

    engines: int
    blocks: int = 1
    trainers: int = 1
    places: int | None = None
    shared_prompts: bool = False
    scatter: float = 0.0
    contention: float = 1.0
    limits: Limits = field(default_factory=Limits)
    window_apart: bool = False

    def __post_init__(self) -> None:
        if min(self.engines, self.blocks, self.trainers) < 1:
            raise ConfigError(f"a layout has engines, blocks and trainers, found {self}")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step on the clock, in seconds.

    decoded_s: when the last response was. dispatch_s: when the first pass of scoring or the update began. trained_s:
    when the last pass or optimizer step ended. compute_s: what those passes took, a mean over replicas; under async
    steps overlap.
    """

    start_s: float
    decoded_s: float
    dispatch_s: float
    trained_s: float
    end_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """From the first launch to the published weights."""
        return self.end_s - self.start_s

    @property
    def waiting_ratio(self) -> float:
        """Part of the time until training ends in which a trainer does not compute."""
        return 1 - self.compute_s / (self.trained_s - self.start_s)


@dataclass(frozen=True)
class Simulation:
    """What `simulate` gives. events: ends of tasks and responses."""

    schedule: str
    steps: tuple[StepTimes, ...]
    spans: tuple[Span, ...]
    events: int

    @property
    def seconds_per_step(self) -> float:
        """From beginning to end, over the number of steps."""
        return (self.steps[-1].end_s - self.steps[0].start_s) / len(self.steps)


def simulate(
    schedule: Schedule | RunSchedule,
    spec: StepSpec,
    feed: Feed,
    layout: Layout,
    *,
    seconds: PhaseSeconds,
    table: StepTable,
    steps: int = 1,
    traced: Collection[int] = range(1),
) -> Simulation:
    """Run `steps` steps of `schedule`.

    spec: of one block where there are blocks, of the whole step with pools. traced: steps whose spans are kept; blocks
    keep those of the first. Equal arguments give equal results.
    """
    run = _Run(spec, feed, layout, seconds, table, traced)
    with _uncollected():
        return _of_kind(run, schedule, steps)


def _of_kind(run: _Run, schedule: Schedule | RunSchedule, steps: int) -> Simulation:
    if isinstance(schedule, (Async, InTurn, Disaggregated, RolloutPipe)):
        several: RunSchedule = schedule if isinstance(schedule, (Async, InTurn)) else InTurn(schedule)
        return run.pools(several, steps)
    return run.blocks(schedule, steps)  # type: ignore[arg-type]  # whatever else is no schedule for several steps


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for reference cycles. A run makes none, and has millions of tasks and events that live long:
    looking through them again and again is a fifth of the time at 16,384 devices."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class _Run:
    spec: StepSpec
    feed: Feed
    layout: Layout
    seconds: PhaseSeconds
    table: StepTable
    traced: Collection[int]

    def blocks(self, schedule: Schedule, steps: int) -> Simulation:
        """Block by block, step by step."""
        found, spans, events, now_s = [], list[Span](), 0, 0.0
        count, blocks = self.spec.num_groups, self.layout.blocks
        for step in range(steps):
            groups = self.feed.groups(step, count * blocks)
            ran = []
            for block in range(blocks):
                own = groups[block * count : (block + 1) * count]
                executor = self._executor(_always(own), now_s, keep=block == 0 and step in self.traced)
                run_step(schedule, executor.of_step(step), self.spec, self.layout.limits)
                ran.append(executor)
                spans += executor.spans
                events += executor.events
            slowest = max(ran, key=lambda executor: executor.now_s)
            found.append(_times(slowest.use, step, now_s, 1, trains_in_window=not self.layout.window_apart))
            now_s = slowest.now_s
        return Simulation(schedule.name, tuple(found), tuple(spans), events)

    def pools(self, schedule: RunSchedule, steps: int) -> Simulation:
        """One executor for all steps, which may overlap."""
        open_groups: dict[int, list[GroupLoad]] = {}

        def loads(step: int) -> list[GroupLoad]:
            if step not in open_groups:
                open_groups.pop(step - schedule.depth, None)
                open_groups[step] = self.feed.groups(step, self.spec.num_groups)
            return open_groups[step]

        limits = Limits(
            main=self.layout.trainers, decode=self.layout.limits.decode, reward=self.layout.limits.reward, window=0
        )
        executor = self._executor(loads, 0.0, keep=bool(self.traced))
        run_steps(schedule, executor, [self.spec] * steps, limits)
        starts = [executor.use[step, Lane.DECODE].first_s for step in range(steps)]
        found = tuple(_times(executor.use, step, starts[step], self.layout.trainers) for step in range(steps))
        spans = tuple(span for span in executor.spans if span.step in self.traced)
        return Simulation(schedule.name, found, spans, executor.events)

    def _executor(self, loads: Callable[[int], Sequence[GroupLoad]], now_s: float, *, keep: bool) -> VirtualExecutor:
        layout = self.layout

        def seconds(step: int, task: Task) -> float:
            load = loads(step)[task.group] if task.phase not in (Phase.OPTIMIZER, Phase.PUBLISH) else None  # type: ignore[index]
            return self.seconds(task.phase, load)

        engines = [
            Engine(
                self.table,
                places=layout.places,
                shared_prompts=layout.shared_prompts,
                scatter=layout.scatter,
                seed=self.feed.seed + number,
            )
            for number in range(layout.engines)
        ]
        return VirtualExecutor(seconds, loads, engines, layout.contention, keep_spans=keep, now_s=now_s)


def _always(groups: list[GroupLoad]) -> Callable[[int], Sequence[GroupLoad]]:
    return lambda step: groups


def _times(
    use: dict[tuple[int, Lane], LaneUse], step: int, start_s: float, replicas: int, *, trains_in_window: bool = True
) -> StepTimes:
    main, decode, window = (use.get((step, lane)) for lane in (Lane.MAIN, Lane.DECODE, Lane.WINDOW))
    assert main is not None and decode is not None  # every rollout decodes, every step ends in OPTIMIZER
    first = main if window is None else window
    return StepTimes(
        start_s=start_s,
        decoded_s=decode.last_s,
        dispatch_s=first.first_s,
        trained_s=main.last_s,
        end_s=main.last_s,
        compute_s=(main.busy_s + (window.busy_s if window is not None and trains_in_window else 0.0)) / replicas,
    )
