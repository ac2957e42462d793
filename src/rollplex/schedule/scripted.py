"""An executor on a simulated clock: tasks take the durations it is given. Deterministic; for tests and planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollplex.errors import StateError
from rollplex.schedule.spec import Phase, Task
from rollplex.schedule.step import Lane, Launch, Limits
from rollplex.trace import Span

Durations = Callable[[Task], float]
"""Seconds that a task takes."""


def by_phase(seconds: Mapping[Phase, float]) -> Durations:
    """The same duration for a phase in every group. Raises KeyError for a phase without one, when it is launched."""
    return lambda task: seconds[task.phase]


class ScriptedExecutor:
    """Runs nothing; keeps time. Each lane runs its tasks at full speed, whatever runs in others.

    durations: seconds per task, at least 0.
    finish_order: given, running tasks end in this order instead of by duration (a duration is then the least a task
    takes): every order of completion can be played. Tasks that it does not name end first, by duration.
    limits: given, launching into a full lane raises StateError, so that no schedule is trusted to count slots.
    """

    def __init__(
        self,
        durations: Durations,
        *,
        finish_order: Sequence[Task] = (),
        limits: Limits | None = None,
        step: int = 0,
        start_s: float = 0.0,
    ):
        self.now_s = start_s
        self.spans: list[Span] = []
        self.finished: list[Task] = []
        self._durations, self._limits, self._step, self._start_s = durations, limits, step, start_s
        self._rank = {task: number for number, task in enumerate(finish_order)}
        self._running: list[tuple[Launch, float, float]] = []  # launch, start, earliest end

    @property
    def makespan_s(self) -> float:
        """Simulated seconds since the start."""
        return self.now_s - self._start_s

    def launch(self, launch: Launch) -> None:
        """Start a task at the present simulated time."""
        seconds = self._durations(launch.task)
        if seconds < 0:
            raise ValueError(f"{launch.task} has a duration of {seconds} s, needed at least 0")
        slots = None if self._limits is None else self._limits.slots(launch.lane)
        if slots is not None and sum(other.lane is launch.lane for other, _, _ in self._running) >= slots:
            raise StateError(f"{launch.task} was launched into lane {launch.lane}, whose {slots} slots are taken")
        self._running.append((launch, self.now_s, self.now_s + seconds))

    def wait(self) -> Task:
        """Move the clock to the next end; ties end in the order of their launches."""
        if not self._running:
            raise StateError("nothing runs: there is no task to wait for")
        entry = min(self._running, key=lambda item: (self._rank.get(item[0].task, -1), item[2]))
        self._running.remove(entry)
        launch, start_s, end_s = entry
        self.now_s = max(self.now_s, end_s)
        task = launch.task
        self.finished.append(task)
        self.spans.append(
            Span(task.phase, launch.lane, start_s, self.now_s, step=self._step, group=task.group, source="simulated")
        )
        return task

    def abort(self) -> None:
        """Drop what runs."""
        self._running.clear()

    def busy_s(self, lane: Lane) -> float:
        """Seconds in which at least one task ran in `lane`."""
        total, until = 0.0, float("-inf")
        for start_s, end_s in sorted((s.start_s, s.end_s) for s in self.spans if s.lane == lane):
            total += max(0.0, end_s - max(start_s, until))
            until = max(until, end_s)
        return total
