"""SIGTERM ends a run as Ctrl-C does: finished steps are kept. Cluster schedulers and service managers send it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STATUS = 128 + signal.SIGTERM
_Handler = Callable[[int, FrameType | None], None]


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """For the block, SIGTERM raises SystemExit(143) in the main thread. Elsewhere than there it changes nothing: Python
    takes signals in the main thread only."""

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.exit(EXIT_STATUS)

    with _handled(end):
        yield


@contextmanager
def noted_sigterm() -> Iterator[Callable[[], bool]]:
    """For the block, SIGTERM is only noted, however often it comes (a scheduler and torchrun may both send it); the
    value says whether it has come. For a process that others need to save what it holds: all end after a step."""
    noted = threading.Event()
    with _handled(lambda _number, _frame: noted.set()):
        yield noted.is_set


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
