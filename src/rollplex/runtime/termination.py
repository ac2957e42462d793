"""SIGTERM ends a run as Ctrl-C does: finished steps are kept. Cluster schedulers and service managers send it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STATUS = 128 + signal.SIGTERM


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """For the block, SIGTERM raises SystemExit(143) in the main thread. Elsewhere than there it changes nothing: Python
    takes signals in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.exit(EXIT_STATUS)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
