"""The executor of virtual time: real schedules on a simulated clock, engines whose speed depends on what they hold.

A task in lane MAIN or REWARD takes the seconds it is given. DECODE goes to the engine with the fewest groups and ends
with the group's last response; so does PREFILL in lane DECODE, which an engine takes in before it decodes on.
While lanes DECODE and WINDOW are both in use, everything in both takes `contention` times as long: the one factor for
all that two kernels of one device do to each other. 1: overlap is free. 2: nothing is gained over one after the other.
Lanes that are slowed differently, as by threads of their own, have a factor each (beside.py finds both in traces).

Events are ends of tasks and of responses; none is a token. One event costs the logarithm of what runs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollplex.errors import StateError
from rollplex.planner.engine import Engine
from rollplex.planner.load import GroupLoad
from rollplex.schedule.spec import Phase, Task
from rollplex.schedule.step import Lane, Launch
from rollplex.trace import Span

Seconds = Callable[[int, Task], float]
"""Seconds of a task of a step, alone on its devices; DECODE is not asked for."""
Loads = Callable[[int], Sequence[GroupLoad]]
"""The groups of a step."""


@dataclass(slots=True)
class LaneUse:
    """Use of a lane in one step; every PREFILL counts as lane DECODE. `busy_s` adds up slots, the rest is clock."""

    first_s: float
    last_s: float
    busy_s: float = 0.0


@dataclass(slots=True)
class _Running:
    step: int
    launch: Launch
    start_s: float
    left_s: float = 0.0  # of a task in the window


@dataclass
class VirtualExecutor:
    """Runs nothing; keeps time. `run.run_steps` drives it; `of_step` is the same for `step.run_step`.

    engines: of the rollout pool, or of the device that samples and trains. window_contention: of passes, where it is
    another than that of decoding. keep_spans: write down what ran.
    """

    seconds: Seconds
    loads: Loads
    engines: Sequence[Engine]
    contention: float = 1.0
    window_contention: float | None = None
    keep_spans: bool = True
    now_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    use: dict[tuple[int, Lane], LaneUse] = field(default_factory=dict)
    events: int = 0  # ends of tasks and responses so far

    def __post_init__(self) -> None:
        beside = self.contention, self.contention if self.window_contention is None else self.window_contention
        if not min(beside) >= 1:
            raise ValueError(f"contention is {min(beside)}, needed 1 (overlap is free) or more")
        self._count = 0
        self._timed: list[tuple[float, int, _Running]] = []
        self._window: dict[int, _Running] = {}
        self._window_s = self.now_s  # until when the window's tasks have got on
        self._clocks = [self.now_s] * len(self.engines)  # until when each engine has
        self._stamps = [0] * len(self.engines)
        self._wakes: list[tuple[float, int, int]] = []  # next end of an engine, its stamp, its number; old ones stay
        self._active = 0  # engines
        self._alone, self._beside = (1.0, 1.0), (1 / beside[0], 1 / beside[1])
        self._rates = self._alone  # speed of decoding, and of passes in the window
        self._home: dict[tuple[int, int | None], int] = {}  # engine of a group that is taken in and not decoded
        self._held = [0] * len(self.engines)  # groups of each
        self._least = [
            (0, index) for index in range(len(self.engines))
        ]  # heap; entries that are not true any more stay
        self._ended: deque[_Running] = deque()

    def launch(self, step: int, launch: Launch) -> None:
        """Start a task at the present simulated time."""
        task, running = launch.task, _Running(step, launch, self.now_s)
        if task.phase is Phase.DECODE:
            assert task.group is not None
            self._to_engine(running, lambda engine: engine.decode(running, self.loads(step)[task.group or 0]))
            return
        seconds = self.seconds(step, task)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{task} has a duration of {seconds} s, needed at least 0")
        if launch.lane is Lane.DECODE:
            self._to_engine(running, lambda engine: engine.prefill(running, seconds))
        elif launch.lane is Lane.WINDOW:
            self._pass_window()
            self._count += 1
            running.left_s = seconds
            self._window[self._count] = running
        else:
            self._count += 1
            heapq.heappush(self._timed, (self.now_s + seconds, self._count, running))

    def wait(self) -> tuple[int, Task]:
        """Move the clock to the next end of a task."""
        while not self._ended:
            self._next_event()
        running = self._ended.popleft()
        self._write_down(running)
        return running.step, running.launch.task

    def abort(self) -> None:
        """Drop what runs."""
        self._timed.clear()
        self._window.clear()
        self._wakes.clear()
        self._ended.clear()

    def of_step(self, step: int) -> StepView:
        """This executor for one step."""
        return StepView(self, step)

    def _next_event(self) -> None:
        """One end in some lane; ties: the main lane's first, then the window's."""
        self._set_rate()  # once, after all that was launched at this moment
        while self._wakes and self._wakes[0][1] != self._stamps[self._wakes[0][2]]:
            heapq.heappop(self._wakes)
        main_s = self._timed[0][0] if self._timed else math.inf
        window_s, number = self._window_end() if self._window else (math.inf, 0)
        engine_s = self._wakes[0][0] if self._wakes else math.inf
        self.events += 1
        at = min(main_s, window_s, engine_s)
        if at == math.inf:
            raise StateError("nothing runs: there is no task to wait for")
        self.now_s = max(self.now_s, at)
        if main_s == at:
            self._ended.append(heapq.heappop(self._timed)[2])
        elif window_s == at:
            self._pass_window()
            self._ended.append(self._window.pop(number))
        else:
            self._engine_event(self._wakes[0][2])

    def _engine_event(self, index: int) -> None:
        engine = self.engines[index]
        running = engine.end_next()
        self._clocks[index] = self.now_s
        if isinstance(running, _Running):
            self._ended.append(running)
            if running.launch.task.phase is Phase.DECODE:
                self._hold(index, -1)
                del self._home[running.step, running.launch.task.group]
        self._active -= not engine.active
        self._wake(index)

    def _to_engine(self, running: _Running, give: Callable[[Engine], None]) -> None:
        key = running.step, running.launch.task.group
        if key not in self._home:
            self._home[key] = self._freest()
            self._hold(self._home[key], 1)
        index = self._home[key]
        engine = self.engines[index]
        self._pass_engine(index)
        was_active = engine.active
        give(engine)
        self._active += not was_active
        self._wake(index)

    def _freest(self) -> int:
        """The first of the engines with the fewest groups."""
        while self._least[0][0] != self._held[self._least[0][1]]:
            heapq.heappop(self._least)
        return self._least[0][1]

    def _hold(self, index: int, more: int) -> None:
        self._held[index] += more
        heapq.heappush(self._least, (self._held[index], index))

    def _wake(self, index: int) -> None:
        """Note when the engine's next end is, at the present rate."""
        self._stamps[index] += 1
        wait = self.engines[index].until_next()
        if wait < math.inf:
            heapq.heappush(self._wakes, (self.now_s + wait / self._rates[0], self._stamps[index], index))

    def _pass_engine(self, index: int) -> None:
        """Let the engine get on up to now."""
        passed = (self.now_s - self._clocks[index]) * self._rates[0]
        self._clocks[index] = self.now_s
        if passed > 0:
            self.engines[index].advance(min(passed, self.engines[index].until_next()))

    def _pass_window(self) -> None:
        passed, self._window_s = (self.now_s - self._window_s) * self._rates[1], self.now_s
        for running in self._window.values():
            running.left_s = max(0.0, running.left_s - passed)

    def _window_end(self) -> tuple[float, int]:
        """When the window's next task ends, and which; it is the first of those with the least left. There is one."""
        number = min(self._window, key=lambda key: self._window[key].left_s)
        return self._window_s + self._window[number].left_s / self._rates[1], number

    def _set_rate(self) -> None:
        """Speed of both lanes from now on; what ran until now did so at the old one."""
        rates = self._beside if self._window and self._active else self._alone
        if rates == self._rates:
            return
        self._pass_window()
        for index, engine in enumerate(self.engines):
            if engine.active:
                self._pass_engine(index)
        self._rates = rates
        for index, engine in enumerate(self.engines):
            if engine.active:
                self._wake(index)

    def _write_down(self, running: _Running) -> None:
        task, lane = running.launch.task, running.launch.lane
        key = running.step, Lane.DECODE if task.phase is Phase.PREFILL else lane  # sampling, wherever it runs
        use = self.use.get(key)
        if use is None:
            use = self.use[key] = LaneUse(running.start_s, self.now_s)
        use.first_s = min(use.first_s, running.start_s)
        use.last_s = self.now_s
        use.busy_s += self.now_s - running.start_s
        if self.keep_spans:
            self.spans.append(
                Span(
                    task.phase,
                    lane,
                    running.start_s,
                    self.now_s,
                    step=running.step,
                    group=task.group,
                    source="simulated",
                )
            )


@dataclass(frozen=True, slots=True)
class StepView:
    """A `VirtualExecutor` as an executor of one step (step.py)."""

    executor: VirtualExecutor
    step: int

    def launch(self, launch: Launch) -> None:
        """Start a task of this step."""
        self.executor.launch(self.step, launch)

    def wait(self) -> Task:
        """The next task to end."""
        return self.executor.wait()[1]

    def abort(self) -> None:
        """Drop what runs."""
        self.executor.abort()
