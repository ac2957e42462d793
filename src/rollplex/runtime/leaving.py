"""How the command's process ends: exit handlers run, streams are flushed, and it is gone.

Native libraries are not torn down. Now and then (2 of some 70 cold starts) a process that had done all its work ended
with "terminate called without an active exception" and status 134, long after the last line of Python.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(command: Callable[[], object]) -> NoReturn:
    """Run `command`, then end the process with the status of its SystemExit (0 where it returns). Any other exception
    is raised as it is."""
    status = 0
    try:
        command()
    except SystemExit as end:
        status = _status(end)
    # As a normal end does: threads that are no daemons (an executor's workers are told to end first), then trackers,
    # child processes, temporary files.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever reads may be gone
            stream.flush()
    os._exit(status)


def _status(end: SystemExit) -> int:
    """As Python has it: None is 0, a text is printed and is 1."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1
