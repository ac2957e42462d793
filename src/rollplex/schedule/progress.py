"""What of a step has started and ended, and all that follows from it, kept up to date: constant work per event.

The state that schedules see (step.py: `StepState`) never changes; what stands here is the ledger behind it, which does.
States share one as long as each goes on from the newest, as `run_step` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from rollplex.schedule.spec import UPDATE_PASSES, Lifetime, Phase, StepSpec, Task


class Lane(StrEnum):
    """Where a task runs. Lanes run beside each other; each has a number of slots (`Limits`).

    On one device (serial, rollplex, stream) MAIN and the others but REWARD are never used at once. With two pools
    (pools.py) DECODE is the rollout pool and MAIN the trainer pool; WINDOW may be devices of the reference (hybrid.py).
    """

    MAIN = "main"  # passes that have the device to themselves: all cores, or the default stream
    DECODE = "decode"  # high priority: the groups that one engine decodes together, and prefills while it decodes
    WINDOW = "window"  # low priority: passes beside DECODE
    REWARD = "reward"  # threads of reward functions; no device


class Launch(NamedTuple):
    """A task to start in a lane. Example: Launch(Task(Phase.REF_PREFIX, 3), Lane.WINDOW)"""

    task: Task
    lane: Lane


Event = Launch | Task
"""A launch, or the end of a task."""


class Progress:
    """The ledger of one step. Trusts its caller: whether a launch is legal, `StepState` has checked before."""

    __slots__ = (
        "_cursors",
        "_needs_left",
        "_users_left",
        "begun",
        "consumed",
        "done",
        "ended",
        "events",
        "in_lane",
        "left",
        "optimized",
        "running",
        "running_of",
        "spec",
        "startable",
        "started_of",
        "used_bytes",
    )

    def __init__(self, spec: StepSpec, events: Iterable[Event] = ()):
        self.spec = spec
        self.events: list[Event] = []
        self.running: dict[Task, Launch] = {}  # in the order of their launches
        self.done: dict[Task, None] = {}  # in the order of their ends
        self.in_lane: dict[Lane, dict[Task, None]] = {lane: {} for lane in Lane}
        self.running_of, self.started_of = dict.fromkeys(Phase, 0), dict.fromkeys(Phase, 0)
        self.used_bytes = 0
        self.left = dict(spec.tasks_per_phase)  # not done yet
        self.ended: dict[Phase, list[int]] = {phase: [] for phase in Phase}  # groups, in the order of their ends
        self.begun: set[int] = set()  # groups of which a pass of the update was launched
        self.consumed = self.optimized = 0  # groups whose update passes are done; optimizer steps that are
        self._needs_left = dict(spec.needs_count)
        self._users_left: dict[int, int] = {}  # by id of a lifetime, from its first user's end on
        self._cursors: dict[int, tuple[Sequence[Task], int]] = {}  # by id of an order: all before is launched
        # Tasks whose needs are done and that were not launched, each list with the last group first: schedules take the
        # first groups first, and what stands at the end of a list is taken from it in constant time.
        self.startable: dict[Phase, list[Task]] = {phase: [] for phase in Phase}
        for task in reversed(spec.roots):
            self.startable[task.phase].append(task)
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Write down one event."""
        if isinstance(event, Launch):
            self._start(event)
        else:
            self._end(event)
        self.events.append(event)

    def waits(self, task: Task) -> bool:
        """Whether something that `task` needs is not done."""
        return self._needs_left[task] > 0

    def launched(self, task: Task) -> bool:
        """Whether `task` was started, be it done or not."""
        return task in self.done or task in self.running

    def unlaunched(self, order: Sequence[Task]) -> Iterator[Task]:
        """Tasks of `order` that were not launched; looks no more at those in front that were."""
        known, start = self._cursors.get(id(order), (order, 0))
        if known is not order:  # an order that is gone had the same id
            start = 0
        while start < len(order) and self.launched(order[start]):
            start += 1
        self._cursors[id(order)] = order, start
        return (order[index] for index in range(start, len(order)) if not self.launched(order[index]))

    def unit_obstacle(self, task: Task) -> str | None:
        """Why weights that move within the rollout (StepSpec.unit) forbid `task` now."""
        unit = self.spec.unit
        if unit is None:
            return None
        if task.phase is Phase.OPTIMIZER and self.consumed < unit * ((task.group or 0) + 1):
            return f"{task} needs {unit * ((task.group or 0) + 1)} groups consumed, {self.consumed} are"
        if task.phase in UPDATE_PASSES and task.group not in self.begun and len(self.begun) >= self._may_begin(unit):
            return f"{task} belongs to a later unit: {len(self.begun)} groups are for optimizer step {self.optimized}"
        return None

    def _may_begin(self, unit: int) -> int:
        return unit * (self.optimized + 1)

    def _start(self, launch: Launch) -> None:
        task = launch.task
        self.running[task] = launch
        self.running_of[task.phase] += 1
        self.started_of[task.phase] += 1
        self.in_lane[launch.lane][task] = None
        _remove(self.startable[task.phase], task)
        if self.spec.holds:
            self.used_bytes += sum(life.nbytes for life in self.spec.started_by(task))
        if task.phase in UPDATE_PASSES and task.group is not None:
            self.begun.add(task.group)

    def _end(self, task: Task) -> None:
        launch = self.running.pop(task)
        del self.in_lane[launch.lane][task]
        self.running_of[task.phase] -= 1
        self.done[task] = None
        self.left[task.phase] -= 1
        for other in self.spec.dependents[task]:
            self._needs_left[other] -= 1
            if not self._needs_left[other] and not self.launched(other):
                _insert(self.startable[other.phase], other)
        if self.spec.holds:
            for life in self.spec.used_by(task):
                self._release(life)
        if task.group is not None:
            self.ended[task.phase].append(task.group)
        if task.phase is self.spec.last_pass:
            self.consumed += 1
        elif task.phase is Phase.OPTIMIZER:
            self.optimized += 1

    def _release(self, life: Lifetime) -> None:
        left = self._users_left.get(id(life), len(life.users)) - 1
        self._users_left[id(life)] = left
        if not left:
            self.used_bytes -= life.nbytes


def _from_last(task: Task) -> int:
    return -(task.group or 0)


def _insert(tasks: list[Task], task: Task) -> None:
    """Put `task` into a list with the last group first."""
    if tasks and _from_last(task) < _from_last(tasks[-1]):
        insort(tasks, task, key=_from_last)
    else:
        tasks.append(task)


def _remove(tasks: list[Task], task: Task) -> None:
    """Take `task` out of a list with the last group first, if it is there."""
    if tasks and tasks[-1] == task:
        tasks.pop()
        return
    index = bisect_left(tasks, _from_last(task), key=_from_last)
    if index < len(tasks) and tasks[index] == task:
        del tasks[index]


def events_of(done: Iterable[Task], running: Iterable[Launch]) -> list[Event]:
    """Events that lead to these tasks done and running; lanes of the former are not known any more, nor needed."""
    ended: list[Event] = []
    for task in done:
        ended += [Launch(task, Lane.MAIN), task]
    return [*ended, *running]
