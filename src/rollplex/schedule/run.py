"""Several steps, of which more than one may be open: the loop that drives them, and `async`, which needs it.

A schedule of step.py sees one step. Here a schedule sees every open step and says for each launch which step it is of;
`InTurn` makes one of the former into one of these: a step is opened when the one before is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from rollplex.errors import ConfigError, StateError
from rollplex.schedule.pools import admitted, all_groups, check_pools, offer_sampling, offer_training
from rollplex.schedule.spec import Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, Schedule, StepState, deadlock
from rollplex.schedule.turn import Turn


@dataclass(frozen=True, slots=True)
class RunState:
    """The steps that are open, by number; those before are done."""

    steps: Mapping[int, StepState]
    finished: int  # steps that are done: so many times new weights were published


class RunSchedule(Protocol):
    """Decides what of which step starts when and where, from the open steps alone."""

    name: str
    depth: int  # steps that may be open at once

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """As `Schedule.check`."""
        ...

    def ready(self, run: RunState) -> Iterable[tuple[int, Launch]]:
        """What to start now, each with its step."""
        ...


class RunExecutor(Protocol):
    """An executor (step.py) for tasks of several steps."""

    def launch(self, step: int, launch: Launch) -> None:
        """Start a task; returns at once."""
        ...

    def wait(self) -> tuple[int, Task]:
        """The next task to end, with its step."""
        ...

    def abort(self) -> None:
        """As `Executor.abort`."""
        ...


def run_steps(schedule: RunSchedule, executor: RunExecutor, specs: Iterable[StepSpec], limits: Limits) -> int:
    """Drive the steps 0, 1, .. to their end; how many there were. Errors as in `step.run_step`.

    Specs are taken one by one as steps are opened, so there may be endlessly many.
    """
    coming, states, opened = iter(specs), dict[int, StepState](), 0
    run = RunState(states, 0)
    try:
        while True:
            if len(states) < schedule.depth:
                for spec in islice(coming, schedule.depth - len(states)):
                    schedule.check(spec, limits)
                    states[opened] = StepState(spec, limits)
                    opened += 1
                if not states:
                    return opened
                run = RunState(states, opened - len(states))
            launched = False
            for step, launch in schedule.ready(run):
                states[step] = states[step].launch(launch)
                executor.launch(step, launch)
                launched = True
            if not launched and all(state.idle for state in states.values()):
                first, state = next(iter(states.items()))
                raise StateError(f"step {first}: {deadlock(schedule.name, state)}")
            step, task = executor.wait()
            states[step] = states[step].finish(task)
            if states[step].finished:
                del states[step]
    except BaseException:
        executor.abort()
        raise


class InTurn:
    """One step after another, each by a schedule of its own."""

    depth = 1

    def __init__(self, schedule: Schedule):
        self.name, self._schedule = schedule.name, schedule

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """As the schedule's."""
        self._schedule.check(spec, limits)

    def ready(self, run: RunState) -> Iterable[tuple[int, Launch]]:
        """What the schedule starts in the one open step."""
        return [(step, launch) for step, state in run.steps.items() for launch in self._schedule.ready(state)]


class Async:
    """Two pools at work at once: while one trains on a rollout, the other samples the next. OFF-POLICY by one step.

    Rollout k begins before update k - 1 and trains the weights after it: they have moved once since (not for rollout 0,
    which has nothing before it). A rollout never sees two versions: PUBLISH waits until the engines hold no group, and
    the next rollout for that PUBLISH. For comparison only: every other schedule is on-policy.
    """

    name = "async"
    depth = 2
    stale_steps = 1

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Refuses what two pools do not have, and weights that move within a rollout besides."""
        check_pools(self.name, spec, limits)
        if spec.unit is not None:
            raise ConfigError("schedule 'async' has one optimizer step per rollout; leave StepSpec.unit out")

    def ready(self, run: RunState) -> Iterable[tuple[int, Launch]]:
        """Sampling, the older step first; then training, likewise."""
        turns = {step: Turn(state, state.spec.by_stage) for step, state in run.steps.items()}
        for step, turn in turns.items():
            turn.offer_rewards()
            older = [other.state for number, other in turns.items() if number < step]
            if all(state.all_done(Phase.DECODE) and not state.runs(Phase.PUBLISH) for state in older):
                offer_sampling(turn)
        sampling = any(admitted(turn.state) and turn.state.left(Phase.DECODE) for turn in turns.values())
        for step, turn in turns.items():
            older = [other.state for number, other in turns.items() if number < step]
            if all(state.all_done(Phase.OPTIMIZER) and not state.busy(Lane.MAIN) for state in older):
                offer_training(turn, *all_groups(turn.state), publish=not sampling)
        return [(step, launch) for step, turn in turns.items() for launch in turn.launches]
