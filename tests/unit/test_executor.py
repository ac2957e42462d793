"""When passes beside decoding begin, on scripted work: what an executor does with launches before the engine's first
iteration, which builds caches."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rollplex.runtime.device import CpuLanes
from rollplex.runtime.executor import InProcessExecutor, WindowThread
from rollplex.runtime.stopwatch import Stopwatch
from rollplex.schedule.spec import Phase, Task
from rollplex.schedule.step import Lane, Launch

DEADLINE_S = 20.0


class Bodies:
    """One group that decodes for `iterations`, whose second waits for the pass, which waits for it."""

    def __init__(self, iterations: int) -> None:
        self.iterations, self.done = iterations, 0
        self.passes: list[tuple[Task, bool]] = []  # and whether in the main thread
        self.second, self.passed = threading.Event(), threading.Event()

    def run(self, task: Task) -> None:
        alone = threading.current_thread() is threading.main_thread()
        self.passes.append((task, alone))
        assert alone or self.second.wait(DEADLINE_S)
        self.passed.set()

    def begin_decode(self, group: int) -> None:
        pass

    def decode_iteration(self) -> list[int]:
        self.done += 1
        if self.done == 1:
            assert not self.passed.wait(0.05) and self.passes == []  # time enough for a pass to begin
        else:
            self.second.set()
            assert self.passed.wait(DEADLINE_S)
        return [0] if self.done == self.iterations else []

    def begin_reward(self, group: int, listener: Callable[[], None]) -> None:
        raise AssertionError

    def reward_done(self, group: int) -> bool:
        raise AssertionError

    def end_reward(self, group: int) -> None:
        raise AssertionError

    def reward_deadline_s(self) -> float:
        return DEADLINE_S

    def label(self, task: Task) -> int | None:
        return task.group


@pytest.mark.parametrize(
    ("iterations", "alone"),
    [(3, False), (1, True)],
    ids=["beside the second iteration", "nothing decodes any more: with the whole device"],
)
def test_a_pass_begins_when_the_engine_has_built_its_caches(iterations: int, alone: bool) -> None:
    bodies, window = Bodies(iterations), WindowThread()
    executor = InProcessExecutor(bodies, CpuLanes(1, 1, 1, 1), window, Stopwatch(1), pass_timeout_s=DEADLINE_S)
    decode, prefix = Task(Phase.DECODE, 0), Task(Phase.REF_PREFIX, 0)
    try:
        executor.launch(Launch(decode, Lane.DECODE))
        executor.launch(Launch(prefix, Lane.WINDOW))
        assert bodies.passes == []
        assert {executor.wait(), executor.wait()} == {decode, prefix}
        assert bodies.passes == [(prefix, alone)]
        assert (executor.hidden_s > 0) is not alone
    finally:
        window.close()
