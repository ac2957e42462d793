"""An arm's side of the pipe: JSON lines in on stdin, out on what was stdout.

parent -> arm   the ArmSpec, then {"steps": n} any number of times, then end of file
arm -> parent   {"event": "ready", ...}, then {"event": "block", "steps": [...], "peak_rss": bytes} per request
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from vs_trl_arms.settings import ArmSpec


class StepClock:
    """Times the steps of one block; a step ends where the next begins, so nothing falls between them."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def lap(self) -> dict[str, float]:
        """Since the last lap (or the start): wall `seconds`, and `cpu_seconds` of all threads of this process."""
        wall, cpu = time.monotonic(), time.process_time()
        lap = {"seconds": wall - self._wall, "cpu_seconds": cpu - self._cpu}
        self._wall, self._cpu = wall, cpu
        return lap


class Channel:
    """Takes stdout for the protocol; prints of libraries go to stderr from then on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        line = sys.stdin.readline()
        self.spec = ArmSpec(**json.loads(line))
        torch.set_num_threads(self.spec.threads)

    def ready(self, packages: tuple[str, ...], extra: Mapping[str, Any]) -> None:
        """Say that loading is over: from here on memory is the step's."""
        self._send({"event": "ready", "versions": {name: version(name) for name in packages}, **extra})

    def next_request(self) -> int:
        """Wait for the next block; its number of steps, or 0 when the parent has closed the pipe."""
        line = sys.stdin.readline()
        return int(json.loads(line)["steps"]) if line else 0

    def block(self, steps: list[dict[str, float]]) -> None:
        """Report a finished block."""
        self._send({"event": "block", "steps": steps, "peak_rss": peak_rss()})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def peak_rss() -> int:
    """Largest resident size of this process so far, in bytes (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
