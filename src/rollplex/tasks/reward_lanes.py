"""Threads that run reward functions, each call with a deadline, none able to block another or the interpreter's exit.

Every function has its own lane: a daemon thread that calls a plain function one call at a time (as TRL does, so it need
not be thread-safe), or a daemon thread with an event loop that runs all calls of an async function at once. The clock
of a call starts when the call does. A call over its deadline is given up: Python cannot stop a thread, so the lane is
left behind and its other calls move to a new one. No signals are used.

A thread that waits keeps nothing of the call before: a group and its media would live on in it, and a thread that drops
the last tensor while the interpreter ends takes the process down with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5  # an event loop that does not answer for so long after a call's deadline is taken for blocked
_numbers = itertools.count()


class Overdue(Exception):
    """Set on the future of a call that passed its deadline."""


@dataclass(eq=False)
class Call:
    """One call of one function. `future` is resolved exactly once: answer, exception of the function, or Overdue."""

    run: Callable[[], Any]  # for an async function: makes the coroutine
    timeout_s: float
    future: Future[Any] = field(default_factory=Future)
    deadline: float | None = None  # time.monotonic() value; None until the call starts
    ended: float | None = None  # time.monotonic() value; set before `future` is resolved


class Verdict(NamedTuple):
    """Which calls to give up, and whether their thread is lost with them."""

    expired: list[Call]
    stuck: bool


class FunctionLane:
    """Runs the calls of one function."""

    def __init__(self, name: str, is_async: bool) -> None:
        self._name = name
        self._kind: type[_SyncThread] | type[_LoopThread] = _LoopThread if is_async else _SyncThread
        self._lock = threading.Condition()
        self._calls: list[Call] = []  # not yet resolved, in order of submission
        self._thread: _SyncThread | _LoopThread | None = None
        self._threads: list[threading.Thread] = []  # all that were started
        self._closed = False

    def submit(self, call: Call) -> None:
        """Queue a call; returns at once. Raises RuntimeError after close."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the lane of {self._name} is closed")
            self._calls.append(call)
            if self._thread is None:
                watcher = threading.Thread(target=self._watch, name=f"reward-watch-{self._name}", daemon=True)
                watcher.start()
                self._threads.append(watcher)
                self._thread = self._new_thread()
            self._thread.add(call)
            self._lock.notify_all()

    def close(self) -> list[threading.Thread]:
        """Cancel all unresolved calls. Returns the threads, which now end once their calls have; they are daemons, and
        may be left behind."""
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, []
            thread, self._thread = self._thread, None
            threads, self._threads = self._threads, []
            self._lock.notify_all()
        for call in calls:
            call.future.cancel()
            call.future.set_running_or_notify_cancel()  # else a waiter would not hear of it
        if thread is not None:
            thread.abandon()
        return threads

    def started(self, call: Call, thread: _SyncThread | _LoopThread) -> bool:
        """Start the clock of a call. False: the call is no longer this thread's to run."""
        with self._lock:
            if thread is not self._thread or call.future.done():
                return False
            call.deadline = time.monotonic() + call.timeout_s
            self._lock.notify_all()
            return True

    def finished(self, call: Call, thread: _SyncThread | _LoopThread, answer: Any, error: BaseException | None) -> None:
        """Resolve a call. Too late, or from a thread that was left behind: ignored."""
        with self._lock:
            if thread is not self._thread or call.future.done():
                return
            self._calls.remove(call)
            call.ended = time.monotonic()
            if error is None:
                call.future.set_result(answer)
            else:
                call.future.set_exception(error)

    def _watch(self) -> None:
        while self._judge_overdue():
            pass

    def _judge_overdue(self) -> bool:
        """Wait for calls to pass their deadlines, and give up those that must be. False: the lane is closed."""
        with self._lock:
            while True:
                if self._closed or self._thread is None:
                    return False
                now = time.monotonic()
                if overdue := [c for c in self._calls if c.deadline is not None and c.deadline <= now]:
                    break
                deadlines = [c.deadline for c in self._calls if c.deadline is not None]
                self._lock.wait(min(deadlines) - now if deadlines else None)
            thread = self._thread
        verdict = thread.judge(overdue)  # may wait for a heartbeat, so without the lock
        with self._lock:
            expired = [c for c in verdict.expired if c in self._calls]  # the others have ended meanwhile
            self._calls = [c for c in self._calls if c not in expired]
            for call in expired:
                call.ended = time.monotonic()
                call.future.set_exception(Overdue())
            if verdict.stuck and expired:
                self._replace(thread)
            else:
                thread.cancel(expired)
        return True

    def _replace(self, stuck: _SyncThread | _LoopThread) -> None:
        """Move the unresolved calls to a new thread; their clocks start anew. Called under the lock."""
        logger.warning(
            "reward function %s does not return: its thread is left behind, a new one takes over", self._name
        )
        self._thread = self._new_thread()
        for call in self._calls:
            call.deadline = None
            self._thread.add(call)
        stuck.abandon()

    def _new_thread(self) -> _SyncThread | _LoopThread:
        thread = self._kind(self._name, self)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread.thread]
        return thread


class _SyncThread:
    """Calls one after the other."""

    def __init__(self, name: str, lane: FunctionLane) -> None:
        self._lane = lane
        self._queue: deque[Call] = deque()
        self._wake = threading.Condition()
        self._abandoned = False
        self.thread = threading.Thread(target=self._work, name=f"reward-{name}-{next(_numbers)}", daemon=True)
        self.thread.start()

    def add(self, call: Call) -> None:
        with self._wake:
            self._queue.append(call)
            self._wake.notify()

    def judge(self, overdue: list[Call]) -> Verdict:
        return Verdict(overdue, stuck=True)  # a running plain function cannot be stopped

    def cancel(self, calls: list[Call]) -> None:
        """Nothing to do: the one call that ran has ended meanwhile."""

    def abandon(self) -> None:
        with self._wake:
            self._abandoned = True
            self._queue.clear()
            self._wake.notify()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            self._run(call)
            del call

    def _next(self) -> Call | None:
        with self._wake:
            while not self._queue and not self._abandoned:
                self._wake.wait()
            return None if self._abandoned else self._queue.popleft()

    def _run(self, call: Call) -> None:
        if not self._lane.started(call, self):
            return
        answer, error = None, None
        try:
            answer = call.run()
        except BaseException as raised:  # also SystemExit of a reward function: it must reach the waiter
            error = raised
        self._lane.finished(call, self, answer, error)
        del call, error  # whose traceback holds this frame: call -> future -> error -> frame -> call


class _LoopThread:
    """All calls at once on one event loop, so that a function may keep a client session between calls."""

    def __init__(self, name: str, lane: FunctionLane) -> None:
        self._lane = lane
        self._tasks: dict[Call, asyncio.Task[None]] = {}  # touched on the loop only
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._work, name=f"reward-{name}-{next(_numbers)}", daemon=True)
        self.thread.start()

    def add(self, call: Call) -> None:
        self._post(lambda: self._start(call))

    def judge(self, overdue: list[Call]) -> Verdict:
        """A loop that answers only has slow calls. Else one coroutine blocks it: only that one is to blame."""
        alive = threading.Event()
        if self._post(alive.set) and alive.wait(HEARTBEAT_S):
            return Verdict(overdue, stuck=False)
        running = asyncio.current_task(self._loop)
        blocking = [call for call, task in list(self._tasks.items()) if task is running]
        if not blocking:  # a task that the function made itself: it cannot be told whose
            return Verdict(overdue, stuck=True)
        if blocking[0] in overdue:
            return Verdict(blocking, stuck=True)
        return Verdict([], stuck=False)  # it still has time; the others get their verdict when the loop answers

    def cancel(self, calls: list[Call]) -> None:
        def on_loop() -> None:
            for call in calls:
                task = self._tasks.pop(call, None)
                if task is not None:
                    task.cancel()

        self._post(on_loop)

    def abandon(self) -> None:
        self._post(self._loop.stop)

    def _post(self, callback: Callable[[], None]) -> bool:
        """Run on the loop; False when it is closed already."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))  # lets the cancelled ones end
            self._loop.close()

    def _start(self, call: Call) -> None:
        if self._lane.started(call, self):
            self._tasks[call] = self._loop.create_task(self._run(call))

    async def _run(self, call: Call) -> None:
        answer, error = None, None
        try:
            answer = await call.run()
        except BaseException as raised:  # also SystemExit or a cancellation inside the function: the waiter must know
            error = raised
        self._tasks.pop(call, None)
        self._lane.finished(call, self, answer, error)
        del call, error  # whose traceback holds this frame: call -> future -> error -> frame -> call
