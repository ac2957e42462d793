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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollplex.errors import StateError
from rollplex.schedule.progress import Event, Lane, Launch, Progress, events_of
from rollplex.schedule.spec import Phase, StepSpec, Task

__all__ = ["Executor", "Lane", "Launch", "Limits", "Schedule", "StepState", "deadlock", "run_step"]


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
        slots: int | None = getattr(self, lane)  # fields are named as lanes
        return slots


class StepState:
    """What a schedule may look at: what runs, what is done, what is free. Never changed; moves make a new one.

    Two states are equal when the same tasks run and the same are done, and ended in the same order. A move costs the
    same however large the step is, if made from the newest state of its line (progress.py); from an older one the line
    is played again.
    """

    __slots__ = ("_ledger", "_length", "limits", "spec")

    def __init__(
        self, spec: StepSpec, limits: Limits, running: Iterable[Launch] = (), done: Iterable[Task] = ()
    ) -> None:
        self.spec, self.limits = spec, limits
        self._ledger = Progress(spec, events_of(done, running))
        self._length = len(self._ledger.events)

    @property
    def progress(self) -> Progress:
        """The ledger as of this state: the shared one, or one of its own once another state has gone on with that.

        To be read only, and until the next move.
        """
        if len(self._ledger.events) != self._length:
            self._ledger = Progress(self.spec, self._ledger.events[: self._length])
        return self._ledger

    @property
    def running(self) -> tuple[Launch, ...]:
        """What runs, in the order of the launches."""
        return tuple(self.progress.running.values())

    @property
    def done(self) -> frozenset[Task]:
        """Tasks that have ended. One by one: `is_done`."""
        return frozenset(self.progress.done)

    @property
    def complete(self) -> Sequence[int]:
        """Groups whose rewards are there, in the order in which they came. Not to be changed."""
        return self.progress.ended[Phase.REWARD]

    def ended(self, phase: Phase) -> Sequence[int]:
        """Groups that `phase` is done with, in the order in which it was. Not to be changed."""
        return self.progress.ended[phase]

    @property
    def begun(self) -> int:
        """How many groups the update has begun with."""
        return len(self.progress.begun)

    @property
    def finished(self) -> bool:
        """Whether every task of the step is done."""
        return len(self.progress.done) == len(self.spec.tasks)

    @property
    def idle(self) -> bool:
        """Whether nothing runs."""
        return not self.progress.running

    @property
    def used_bytes(self) -> int:
        """What groups hold now: from the launch of its producer to the end of its last user."""
        return self.progress.used_bytes

    def is_done(self, task: Task) -> bool:
        """Whether `task` has ended."""
        return task in self.progress.done

    def launched(self, task: Task) -> bool:
        """Whether `task` was started, be it done or not."""
        return self.progress.launched(task)

    def busy(self, lane: Lane) -> int:
        """How many tasks run in `lane`."""
        return len(self.progress.in_lane[lane])

    def startable(self, phase: Phase) -> Sequence[Task]:
        """Tasks of `phase` that were not launched and whose needs are done, in the order of the groups."""
        return self.progress.startable[phase][::-1]

    def unlaunched(self, order: Sequence[Task]) -> Iterator[Task]:
        """Tasks of `order` that were not launched. Keep one order: what lies in front is then looked at once."""
        return self.progress.unlaunched(order)

    def started(self, phase: Phase) -> int:
        """How many tasks of `phase` were launched."""
        return self.progress.started_of[phase]

    def runs(self, phase: Phase) -> int:
        """How many tasks of `phase` run."""
        return self.progress.running_of[phase]

    def left(self, phase: Phase) -> int:
        """How many tasks of `phase` are not done."""
        return self.progress.left[phase]

    def missing(self, task: Task) -> tuple[Task, ...]:
        """What `task` needs and is not done yet."""
        done = self.progress.done
        return tuple(need for need in self.spec.needs(task) if need not in done)

    def all_done(self, phase: Phase) -> bool:
        """Whether no task of `phase` is left (also where the step has none)."""
        return not self.progress.left[phase]

    def has_slot(self, lane: Lane) -> bool:
        """Whether `lane` can take one more task."""
        slots = self.limits.slots(lane)
        return slots is None or self.busy(lane) < slots

    def fits(self, task: Task) -> bool:
        """Whether what `task` begins to hold fits beside what is held now."""
        cap = self.limits.memory_bytes
        return cap is None or self.used_bytes + self.spec.bytes_started(task) <= cap

    def obstacle(self, launch: Launch) -> str | None:
        """Why `launch` cannot start now; None when it can."""
        task, lane = launch.task, launch.lane
        now = self.progress
        if task not in self.spec.tasks:
            return f"{task} is no task of this step"
        if task in now.done or task in now.running:
            return f"{task} was launched before"
        if now.waits(task):
            missing = self.missing(task)
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"{task} needs {missing[0]}{more}, not done yet"
        if not self.has_slot(lane):
            return f"{task} found no slot: lane {lane} has {self.limits.slots(lane)}, all taken"
        if not self.fits(task):
            return (
                f"{task} does not fit: it begins to hold {self.spec.bytes_started(task)} bytes beside "
                f"{self.used_bytes} held, of {self.limits.memory_bytes} (Limits.memory_bytes)"
            )
        return now.unit_obstacle(task)

    def launch(self, launch: Launch) -> StepState:
        """The state with `launch` running. Raises StateError when it may not start now."""
        if self._leads_to(launch):
            return self._next()
        if reason := self.obstacle(launch):
            raise StateError(f"illegal launch: {reason}")
        return self.accept(launch)

    def accept(self, launch: Launch) -> StepState:
        """The state with `launch` running, for one in whose way `obstacle` has found nothing."""
        if not self._leads_to(launch):
            self.progress.add(launch)
        return self._next()

    def finish(self, task: Task) -> StepState:
        """The state with `task` done. Raises StateError when it was not running."""
        if not self._leads_to(task):
            if task not in self.progress.running:
                names = [str(item) for item in self.progress.running]
                raise StateError(f"{task} ended without running; running are {names}")
            self.progress.add(task)
        return self._next()

    def _leads_to(self, event: Event) -> bool:
        """Whether the ledger goes on with `event`: a schedule has tried it, and now it is done."""
        events = self._ledger.events
        return len(events) > self._length and events[self._length] == event

    def _next(self) -> StepState:
        state = object.__new__(StepState)
        state.spec, state.limits, state._ledger, state._length = self.spec, self.limits, self._ledger, self._length + 1
        return state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepState):
            return NotImplemented
        return self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def __repr__(self) -> str:
        return f"StepState({len(self.progress.done)} of {len(self.spec.tasks)} tasks done, running {self.running})"

    def _facts(self) -> tuple[object, ...]:
        return self.spec, self.limits, self.running, tuple(self.progress.done)


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
            if state.idle:
                raise StateError(deadlock(schedule.name, state))
            state = state.finish(executor.wait())
    except BaseException:
        executor.abort()
        raise
    return state


def deadlock(name: str, state: StepState) -> str:
    """What to say of schedule `name` that launches nothing while nothing runs: the first task that only it, or memory,
    holds back. One exists, since needs have no cycle."""
    free = [task for task in state.spec.tasks if not state.is_done(task) and not state.missing(task)]
    # Weights that move within the rollout hold back later units, which wait for the first of the others.
    task = next((task for task in free if state.progress.unit_obstacle(task) is None), free[0])
    blocked = [other for other in state.spec.tasks if task in state.spec.needs(other)]
    waiting = f"; {blocked[0]} and {len(blocked) - 1} more wait for it" if blocked else ""
    reason = "its needs are done and it fits, but the schedule does not launch it"
    if obstacle := state.progress.unit_obstacle(task):
        reason = obstacle
    elif not state.fits(task):
        reason = (
            f"it begins to hold {state.spec.bytes_started(task)} bytes beside {state.used_bytes} held, of "
            f"{state.limits.memory_bytes} (Limits.memory_bytes)"
        )
    return (
        f"schedule {name!r} launches nothing while nothing runs, with {len(state.done)} of "
        f"{len(state.spec.tasks)} tasks done: it waits for {task}: {reason}{waiting}"
    )
