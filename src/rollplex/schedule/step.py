"""One optimizer step as tasks, the state it is in, and the loop that drives it. START READING HERE.

A schedule decides, an executor obeys, and neither knows the other: `run_step` asks the schedule what may start, has the
executor start it, waits for one task to end, and asks again. The same schedule so runs in this process (CPU threads or
CUDA streams), on a cluster, and on a simulated clock (scripted.py).

    task             needs (of the same group, unless said)                                    reads the actor's weights
    PREFILL          -                                                                         yes
    DECODE           PREFILL                                                                   yes
    REWARD           DECODE                                                                    no
    REF_PREFIX       -                                                                         no
    ACTOR_PREFIX     -                                                                         yes
    REF_RESPONSE     DECODE, REF_PREFIX (and ACTOR_PREFIX, where old log-probs are wanted)     with old log-probs
    ACTOR_RESPONSE   DECODE, REWARD, REF_RESPONSE, ACTOR_PREFIX (advantages over the batch:    yes
                     REWARD and REF_RESPONSE of all groups)
    PREFIX_BACKWARD  ACTOR_RESPONSE                                                            yes
    OPTIMIZER        every task above, of all groups: the barrier before readers lose them     writes them
    PUBLISH          OPTIMIZER                                                                 yes
Neither prefix needs a response: from PREFILL to the end of DECODE lies the window in which both can run (spec.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from rollplex.errors import StateError
from rollplex.schedule.spec import Phase, StepSpec, Task


class Lane(StrEnum):
    """Where a task runs. Lanes run beside each other; each has a number of slots (`Limits`)."""

    MAIN = "main"  # passes that have the device to themselves: all cores, or the default stream
    DECODE = "decode"  # high priority: the groups that one engine decodes together, and prefills while it decodes
    WINDOW = "window"  # low priority: passes beside DECODE
    REWARD = "reward"  # threads of reward functions; no device


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is to use: slots of each lane (None: as many as asked for) and bytes.

    Example: Limits(decode=8, window=1, memory_bytes=12 << 30)
    """

    main: int | None = 1
    decode: int | None = None  # groups decoded together
    window: int | None = 1  # passes at once beside decoding; 0 switches the window off
    reward: int | None = None
    memory_bytes: int | None = None  # for what groups hold (`Hold`), beside weights and everything else that stays

    def __post_init__(self) -> None:
        for lane in Lane:
            slots, least = self.slots(lane), 0 if lane is Lane.WINDOW else 1
            if slots is not None and slots < least:
                raise ValueError(f"lane {lane} has {slots} slots, needed at least {least}")
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}, needed 0 or more")

    def slots(self, lane: Lane) -> int | None:
        """Slots of `lane`; None: no limit."""
        return {
            Lane.MAIN: self.main,
            Lane.DECODE: self.decode,
            Lane.WINDOW: self.window,
            Lane.REWARD: self.reward,
        }[lane]


@dataclass(frozen=True, slots=True)
class Launch:
    """A task to start in a lane. Example: Launch(Task(Phase.REF_PREFIX, 3), Lane.WINDOW)"""

    task: Task
    lane: Lane


@dataclass(frozen=True)
class StepState:
    """What a schedule may look at: what runs, what is done, what is free. Never changed; moves make a new one."""

    spec: StepSpec
    limits: Limits
    running: tuple[Launch, ...] = ()  # in the order of their launches
    done: frozenset[Task] = frozenset()

    @property
    def finished(self) -> bool:
        """Whether every task of the step is done."""
        return len(self.done) == len(self.spec.tasks)

    @property
    def used_bytes(self) -> int:
        """What groups hold now: from the launch of its producer to the end of its last user."""
        started = self.done | {launch.task for launch in self.running}
        return sum(
            life.nbytes for life in self.spec.lifetimes if life.producer in started and not life.users <= self.done
        )

    def launched(self, task: Task) -> bool:
        """Whether `task` was started, be it done or not."""
        return task in self.done or any(launch.task == task for launch in self.running)

    def running_in(self, lane: Lane) -> tuple[Task, ...]:
        """Tasks that run in `lane`."""
        return tuple(launch.task for launch in self.running if launch.lane is lane)

    def missing(self, task: Task) -> tuple[Task, ...]:
        """What `task` needs and is not done yet."""
        return tuple(need for need in self.spec.needs(task) if need not in self.done)

    def all_done(self, phase: Phase) -> bool:
        """Whether no task of `phase` is left (also where the step has none)."""
        return all(task in self.done for task in self.spec.tasks if task.phase is phase)

    def has_slot(self, lane: Lane) -> bool:
        """Whether `lane` can take one more task."""
        slots = self.limits.slots(lane)
        return slots is None or len(self.running_in(lane)) < slots

    def fits(self, task: Task) -> bool:
        """Whether what `task` begins to hold fits beside what is held now."""
        cap = self.limits.memory_bytes
        return cap is None or self.used_bytes + self.spec.bytes_started(task) <= cap

    def obstacle(self, launch: Launch) -> str | None:
        """Why `launch` cannot start now; None when it can."""
        task, lane = launch.task, launch.lane
        if task not in self.spec.tasks:
            return f"{task} is no task of this step"
        if self.launched(task):
            return f"{task} was launched before"
        if missing := self.missing(task):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"{task} needs {missing[0]}{more}, not done yet"
        if not self.has_slot(lane):
            return f"{task} found no slot: lane {lane} has {self.limits.slots(lane)}, all taken"
        if not self.fits(task):
            return (
                f"{task} does not fit: it begins to hold {self.spec.bytes_started(task)} bytes beside "
                f"{self.used_bytes} held, of {self.limits.memory_bytes} (Limits.memory_bytes)"
            )
        return None

    def launch(self, launch: Launch) -> StepState:
        """The state with `launch` running. Raises StateError when it may not start now."""
        if reason := self.obstacle(launch):
            raise StateError(f"illegal launch: {reason}")
        return replace(self, running=(*self.running, launch))

    def finish(self, task: Task) -> StepState:
        """The state with `task` done. Raises StateError when it was not running."""
        left = tuple(launch for launch in self.running if launch.task != task)
        if len(left) == len(self.running):
            raise StateError(f"{task} ended without running; running are {[str(item.task) for item in self.running]}")
        return replace(self, running=left, done=self.done | {task})


class Schedule(Protocol):
    """Decides what starts when and where, from the state alone: equal states get equal answers."""

    name: str

    def check(self, spec: StepSpec, limits: Limits) -> None:
        """Raises ConfigError, with the reason and what to use instead, for a step that this schedule cannot run."""
        ...

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        """What to start now, in this order; empty: wait for a running task."""
        ...


class Executor(Protocol):
    """Runs tasks, in real or in virtual time."""

    def launch(self, launch: Launch) -> None:
        """Start a task; returns at once."""
        ...

    def wait(self) -> Task:
        """The next task to end. An engine that advances by iterations steps in here, so that a group's DECODE ends with
        its last response. Raises a failed task's error, and DeadlineError when none ends in time."""
        ...

    def abort(self) -> None:
        """An error ended the step: returns when nothing runs any more. Must not raise for tasks that fail meanwhile."""
        ...


def run_step(schedule: Schedule, executor: Executor, spec: StepSpec, limits: Limits) -> StepState:
    """Drive one optimizer step to its end: ask the schedule, launch, wait for one task, repeat.

    Raises ConfigError when the schedule cannot run `spec`, and StateError for an illegal launch and for a schedule that
    launches nothing while nothing runs (a deadlock named, not a hang). After any error nothing is left running.
    """
    schedule.check(spec, limits)
    state = StepState(spec, limits)
    try:
        while not state.finished:
            for launch in schedule.ready(state):
                state = state.launch(launch)
                executor.launch(launch)
            if not state.running:
                raise StateError(_deadlock(schedule, state))
            state = state.finish(executor.wait())
    except BaseException:
        executor.abort()
        raise
    return state


def _deadlock(schedule: Schedule, state: StepState) -> str:
    """Names the first task that only the schedule, or memory, holds back: one exists, since needs have no cycle."""
    task = next(task for task in state.spec.tasks if task not in state.done and not state.missing(task))
    blocked = [other for other in state.spec.tasks if task in state.spec.needs(other)]
    waiting = f"; {blocked[0]} and {len(blocked) - 1} more wait for it" if blocked else ""
    reason = "its needs are done and it fits, but the schedule does not launch it"
    if not state.fits(task):
        reason = (
            f"it begins to hold {state.spec.bytes_started(task)} bytes beside {state.used_bytes} held, of "
            f"{state.limits.memory_bytes} (Limits.memory_bytes)"
        )
    return (
        f"schedule {schedule.name!r} launches nothing while nothing runs, with {len(state.done)} of "
        f"{len(state.spec.tasks)} tasks done: it waits for {task}: {reason}{waiting}"
    )
