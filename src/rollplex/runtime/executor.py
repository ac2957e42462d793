"""Runs a schedule's tasks in this process: decoding in the calling thread, passes beside it in a thread of their own.

The calling thread steps the engine inside `wait`, one iteration at a time, so that a group's DECODE ends with its last
response and whatever else ended meanwhile is heard of between two iterations. Passes that have the device to
themselves run in the calling thread too. Nothing here knows what a task computes (step_tasks.py) or when it should run
(schedule/).
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollplex.errors import DeadlineError, StateError
from rollplex.runtime.device import DeviceLanes
from rollplex.runtime.stopwatch import Stopwatch
from rollplex.schedule.spec import Phase, Task
from rollplex.schedule.step import Lane, Launch

logger = logging.getLogger(__name__)

LAST_WAIT_S = 30.0  # for a pass to end after the step has failed, or at the end of the run
SWITCH_S = 5e-5  # how long a thread computing in Python keeps others from the interpreter that ask for it


@contextmanager
def prompt_switches() -> Iterator[None]:
    """A block in which decoding need not wait long for rewards and passes that run in other threads.

    Decoding asks for the interpreter a few times an iteration, passes at each operation. At Python's own 5 ms a reward
    that computes in Python beside it makes decoding 5 to 7 times slower, at SWITCH_S 1.1 to 1.4 (docs/lab-notes.md).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class TaskBodies(Protocol):
    """What the tasks of a step do; each call in the lane that the schedule chose."""

    def run(self, task: Task) -> None:
        """Any pass over the model, or a phase of the whole step, to its end."""

    def begin_decode(self, group: int) -> None:
        """Hand a group to the engine."""

    def decode_iteration(self) -> list[int]:
        """Advance the engine by one token per live response; groups that are complete with it."""

    def begin_reward(self, group: int, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, whenever `reward_done` may have changed."""

    def reward_done(self, group: int) -> bool:
        """Whether `end_reward` would not wait."""

    def end_reward(self, group: int) -> None:
        """Take the rewards; raises what went wrong in the reward function."""

    def reward_deadline_s(self) -> float:
        """Seconds after which every reward of the step is there or overdue."""

    def label(self, task: Task) -> int | None:
        """What a span of `task` is filed under: a rollout id; None for a task of the whole step."""


@dataclass(frozen=True, slots=True)
class _PassEnded:
    """News from the window's thread."""

    task: Task
    error: BaseException | None


class WindowThread:
    """The one thread of passes beside decoding. It outlives steps, as threads of a CPU pool do.

    A daemon: a pass that never ends can hold up neither the end of a step nor that of the interpreter.
    """

    def __init__(self) -> None:
        self.left_behind: str | None = None  # the pass that a failed step could not wait for
        self._work: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollplex-window", daemon=True)

    def check_free(self) -> None:
        """Raises StateError when a pass of a failed step was left behind: it may add to gradients that the next step,
        with passes of its own in here or not, takes for its own."""
        if self.left_behind is not None:
            raise StateError(f"{self.left_behind} of a step that failed still runs; start again from a checkpoint")

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` after all that was submitted before."""
        self.check_free()
        if not self._thread.is_alive():
            self._thread.start()
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """End the thread after the pass that runs, or leave it behind."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join(LAST_WAIT_S)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:  # whoever waits for the future must know
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, work, future  # they hold a whole step, and the next one may be long in coming


class InProcessExecutor:
    """`schedule.step.Executor` for one optimizer step of this process."""

    def __init__(
        self,
        bodies: TaskBodies,
        lanes: DeviceLanes,
        window: WindowThread,
        watch: Stopwatch,
        *,
        pass_timeout_s: float,
        counting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """counting: entered around what the window's thread does."""
        self.decode_s = 0.0  # spent in engine iterations
        self.hidden_s = 0.0  # of those, with a pass beside it
        self._bodies, self._lanes, self._window, self._watch = bodies, lanes, window, watch
        self._pass_timeout_s, self._counting = pass_timeout_s, counting
        self._inline: deque[Launch] = deque()
        self._iterations = 0  # of the engine
        self._waiting: deque[Launch] = deque()  # passes for the window that wait for the first of them
        self._decoding: set[int] = set()
        self._rewarding: set[int] = set()
        self._passes: dict[Task, Future[None]] = {}
        self._deadlines_s: dict[Task, float] = {}  # of passes in the window
        self._ended: deque[Task] = deque()
        self._news: queue.SimpleQueue[_PassEnded | None] = queue.SimpleQueue()  # None: look at the rewards

    def launch(self, launch: Launch) -> None:
        """Start a task, or note it for the next `wait`."""
        task = launch.task
        if task.phase is Phase.DECODE:
            with self._lanes.main():  # what opening an engine begins on the device has ended when decoding reads it
                self._bodies.begin_decode(_group(task))
            self._decoding.add(_group(task))
        elif task.phase is Phase.REWARD:
            self._rewarding.add(_group(task))
            self._bodies.begin_reward(_group(task), lambda: self._news.put(None))
        elif launch.lane is Lane.WINDOW:
            self._waiting.append(launch)
            if self._iterations or not self._decoding:
                self._begin_passes()
        else:
            self._inline.append(launch)

    def wait(self) -> Task:
        """The next task to end; see `schedule.step.Executor`."""
        while True:
            self._hear(block=False)
            if self._ended:
                return self._ended.popleft()
            if self._inline:
                return self._run_inline(self._inline.popleft())
            if self._decoding:
                self._decode_iteration()
            else:
                self._hear(block=True)

    def abort(self) -> None:
        """Wait for the pass that runs, for a while; forget the rest. Its own error, if any, is secondary."""
        running = [future for future in self._passes.values() if not future.cancel()]
        if wait(running, LAST_WAIT_S).not_done:
            self._window.left_behind = ", ".join(str(task) for task in self._passes)
            logger.warning("%s still runs and is left behind", self._window.left_behind)
        self._inline.clear()
        self._waiting.clear()
        self._decoding.clear()

    def run_rollout(self, num_groups: int) -> None:
        """A rollout and nothing else: prefill, decode and reward groups 0 .. num_groups - 1 (dynamic sampling, whose
        rounds end before it is known what the step learns from)."""
        try:
            for group in range(num_groups):
                self.launch(Launch(Task(Phase.PREFILL, group), Lane.MAIN))
                self.wait()
            for group in range(num_groups):
                self.launch(Launch(Task(Phase.DECODE, group), Lane.DECODE))
            for _ in range(2 * num_groups):
                ended = self.wait()
                if ended.phase is Phase.DECODE:
                    self.launch(Launch(Task(Phase.REWARD, ended.group), Lane.REWARD))
        except BaseException:
            self.abort()
            raise

    def _run_inline(self, launch: Launch) -> Task:
        task = launch.task
        with self._lanes.main(), self._watch.phase(task.phase, lane=launch.lane, group=self._bodies.label(task)):
            self._bodies.run(task)
        return task

    def _pass(self, task: Task) -> None:
        """In the window's thread."""
        begin_s = time.monotonic()
        error: BaseException | None = None
        try:
            with self._counting(), self._lanes.window():
                self._bodies.run(task)
        except BaseException as raised:  # the waiting thread raises it
            error = raised
        try:
            end_s = time.monotonic()
            self._watch.record(task.phase, Lane.WINDOW, begin_s, end_s, group=self._bodies.label(task))
        finally:
            self._news.put(_PassEnded(task, error))

    def _decode_iteration(self) -> None:
        begin_s = time.monotonic()
        beside = bool(self._passes)
        with self._lanes.decode(beside_window=beside):
            complete = self._bodies.decode_iteration()
        seconds = time.monotonic() - begin_s
        self.decode_s += seconds
        self.hidden_s += seconds if beside else 0.0
        self._watch.add(Phase.DECODE, seconds)
        self._iterations += 1
        for group in complete:
            self._decoding.remove(group)
            self._ended.append(Task(Phase.DECODE, group))
        self._begin_passes()

    def _begin_passes(self) -> None:
        """Passes beside decoding begin with its second iteration: the first builds caches, in so many small calls that
        a pass beside it would slow it down by half (docs/lab-notes.md)."""
        while self._waiting:
            launch = self._waiting.popleft()
            if not self._decoding:  # though the schedule may be yet to hear so: the whole device is free
                self._inline.append(Launch(launch.task, Lane.MAIN))
                continue
            task = launch.task
            self._deadlines_s[task] = time.monotonic() + self._pass_timeout_s
            self._passes[task] = self._window.submit(partial(self._pass, task))

    def _hear(self, *, block: bool) -> None:
        """Take in what other threads report; block: wait for the first report, with a deadline."""
        if block:
            self._take(self._wait_for_news())
        while True:
            try:
                self._take(self._news.get_nowait())
            except queue.Empty:
                return

    def _take(self, news: _PassEnded | None) -> None:
        if news is not None:
            del self._passes[news.task]
            if news.error is not None:
                raise news.error
            self._ended.append(news.task)
            return
        for group in sorted(g for g in self._rewarding if self._bodies.reward_done(g)):
            self._bodies.end_reward(group)
            self._rewarding.remove(group)
            self._ended.append(Task(Phase.REWARD, group))

    def _wait_for_news(self) -> _PassEnded | None:
        passes, rewards = [str(task) for task in self._passes], sorted(self._rewarding)
        if not passes and not rewards:
            raise StateError("nothing runs: there is no task to wait for")
        limit_s = self._bodies.reward_deadline_s()
        if passes:
            limit_s = max(0.0, min(self._deadlines_s[task] for task in self._passes) - time.monotonic())
        with self._watch.phase("window" if passes else Phase.REWARD, traced=False):
            try:
                return self._news.get(timeout=limit_s)
            except queue.Empty:
                if passes:
                    raise DeadlineError(
                        f"{', '.join(passes)} did not end within schedule.pass_timeout_s={self._pass_timeout_s:g} s"
                    ) from None
                rollouts = [self._bodies.label(Task(Phase.REWARD, group)) for group in rewards]
                raise DeadlineError(f"rewards of rollouts {rollouts} did not come within {limit_s:g} s") from None


def _group(task: Task) -> int:
    assert task.group is not None  # phases of groups only
    return task.group
