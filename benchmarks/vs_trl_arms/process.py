"""The parent's side: an arm as a child process, its blocks, and its memory sampled from outside."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from vs_trl_arms.settings import ArmSpec

SAMPLE_SECONDS = 0.005
BENCHMARKS = Path(__file__).resolve().parents[1]


class ArmError(RuntimeError):
    """An arm that ended, hung, or answered out of turn; the message has the end of its log."""


class RssPeak:
    """Samples the resident size of another process; the process measured does no work for it."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:  # a sample at least, however soon the end comes
            try:
                self.peak = max(self.peak, self._process.memory_info().rss)
            except psutil.NoSuchProcess:
                return
            if self._stop.wait(SAMPLE_SECONDS):
                return


@dataclass(frozen=True, slots=True)
class Block:
    """What one block of steps gave."""

    steps: list[dict[str, float]]  # seconds, cpu_seconds, mean_length, min_length, max_length, reward
    wall_seconds: float  # request to answer, on the parent's clock
    sampled_peak_rss: int  # bytes, of all samples in the block
    peak_rss: int  # bytes, the kernel's high-water mark of the whole process so far


class ArmProcess:
    """One arm: loads once, then runs a block of steps per request and waits idle in between."""

    def __init__(self, module: str, spec: ArmSpec, work_dir: Path, *, cores: list[int] | None, timeout_s: float):
        self.name = module.rpartition(".")[2].removesuffix("_arm")
        self.timeout_s = timeout_s
        self._work_dir = work_dir / self.name
        self._work_dir.mkdir(parents=True)
        self._log_path = self._work_dir / "log.txt"
        with self._log_path.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._work_dir,
                env=_environment(spec.threads),
            )
        if cores is not None:
            os.sched_setaffinity(self._process.pid, cores)  # before torch starts its threads: they inherit it
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(spec.to_json())
        self.ready = self._receive("ready")
        self.baseline_rss: int = psutil.Process(self._process.pid).memory_info().rss

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run_block(self, steps: int) -> Block:
        """Run `steps` steps and wait for their report. Raises ArmError at the deadline or when the arm has ended."""
        start = time.monotonic()
        with RssPeak(self._process.pid) as sampled:
            self._send({"steps": steps})
            answer = self._receive("block")
        wall = time.monotonic() - start
        return Block(answer["steps"], wall, sampled.peak, answer["peak_rss"])

    def close(self) -> None:
        """End the arm: closing the pipe asks it to, then it is killed."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # it has ended already
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20.0)
        self._reader.join(timeout=20.0)  # it ends with the pipe, which it closes

    def _read(self) -> None:
        assert self._process.stdout is not None  # opened as a pipe
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # opened as a pipe
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._error("has ended") from error

    def _receive(self, event: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self.timeout_s)
        except queue.Empty as error:
            self._process.kill()
            raise self._error(f"gave no {event!r} within --timeout {self.timeout_s:g} s") from error
        if line is None:
            self._process.wait(timeout=20.0)
            raise self._error(f"ended with code {self._process.returncode} before {event!r}")
        message: dict[str, Any] = json.loads(line)
        if message.get("event") != event:
            raise self._error(f"answered {message.get('event')!r}, expected {event!r}")
        return message

    def _error(self, what: str) -> ArmError:
        tail = self._log_path.read_text(encoding="utf-8", errors="replace")[-4000:]
        return ArmError(f"arm {self.name} {what}; the end of its log:\n{tail}")


def _environment(threads: int) -> dict[str, str]:
    count = str(threads)
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
