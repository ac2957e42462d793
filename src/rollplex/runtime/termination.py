"""Ctrl-C and SIGTERM end a run with its finished steps kept. Cluster schedulers and service managers send SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STATUS = 128 + signal.SIGTERM
_Handler = Callable[[int, FrameType | None], None]
_NOTICE = b"\nending after this step, whose weights have moved; Ctrl-C once more ends at once and loses it\n"


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """For the block, SIGTERM raises SystemExit(143) in the main thread. Elsewhere than there it changes nothing: Python
    takes signals in the main thread only."""
    with _handled(signal.SIGTERM, lambda _number, _frame: sys.exit(EXIT_STATUS)):
        yield


@contextmanager
def noted_sigterm() -> Iterator[Callable[[], bool]]:
    """For the block, SIGTERM is only noted, however often it comes (a scheduler and torchrun may both send it); the
    value says whether it has come. For a process that others need to save what it holds: all end after a step."""
    noted = threading.Event()
    with _handled(signal.SIGTERM, lambda _number, _frame: noted.set()):
        yield noted.is_set


class StepEnd:
    """Ctrl-C and SIGTERM in one process: at once, but not between a step's first moved weight and the step's record.

    Weights of half a rollout's optimizer steps belong to no finished step, so there would be nothing to save. What
    comes then is noted and raised by `check`. A second Ctrl-C is raised where it comes; a second SIGTERM is not: a
    scheduler and a launcher may both send one.
    """

    def __init__(self, moved: Callable[[], bool]):
        """moved: whether weights have moved since the last step that is on record."""
        self._moved = moved
        self._at_once = False
        self._noted: int | None = None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """For the block, in the main thread; SIGINT that was ignored (a shell's background job) stays so."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_handled(signal.SIGTERM, self._arrived))
            if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
                stack.enter_context(_handled(signal.SIGINT, self._arrived))
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For a block after which the step is put on record whatever was raised in it, such as an evaluation."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def check(self) -> None:
        """Raise what was noted: the step is on record."""
        number, self._noted = self._noted, None
        if number is not None:
            _raise(number)

    def _arrived(self, number: int, _frame: FrameType | None) -> None:
        insists = self._noted is not None and number == signal.SIGINT
        if self._at_once or insists or not self._moved():
            _raise(number)
        if self._noted is not None:
            return
        self._noted = number
        with contextlib.suppress(OSError):
            os.write(2, _NOTICE)  # not through a stream that this thread may be in the middle of


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(EXIT_STATUS)


@contextmanager
def _handled(number: signal.Signals, handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
