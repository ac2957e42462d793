"""Prompts made ahead of the step by a few threads, handed out in order."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn, Self

from rollplex.config import DataConfig
from rollplex.errors import DeadlineError, OverlongPromptError, RollplexError, RowError, StateError
from rollplex.tasks.order import DataOrder
from rollplex.types import Example, PromptSpec

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0  # for a worker to end its current row at close
_SLOW_FRACTION = 0.25  # of the deadline, after which a row that the step waits for is reported


@dataclass(slots=True)
class _Job:
    """One row on its way through a worker. The worker writes, then sets `finished`; the consumer reads after that."""

    row: int
    started_at: float | None = None
    started: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    example: Example | None = None
    spec: PromptSpec | None = None
    error: BaseException | None = None


class Prefetcher(Iterator[tuple[Example, PromptSpec]]):
    """Iterates over (Example, PromptSpec) in data order, decoding up to `ahead` rows ahead of the consumer.

    `position` counts the rows consumed so far, dropped ones included: save it, and a Prefetcher started there gives
    exactly the rest. `dropped` counts the rows left out by data.overlong=drop since `start`. A row's error is raised
    when its turn comes; then the prefetcher is closed. A row that takes longer than data.media_timeout_s from the
    moment a thread takes it up raises DeadlineError. Threads are daemons: a decoder that hangs cannot hold the process.

    Example:
        with Prefetcher(task.example, builder.build, order, config.data, start=0, ahead=8) as prompts:
            example, spec = next(prompts)
    """

    def __init__(
        self,
        load: Callable[[int], Example],
        build: Callable[[Example], PromptSpec],
        order: DataOrder,
        data: DataConfig,
        *,
        start: int = 0,
        stop: int | None = None,
        ahead: int | None = None,
    ) -> None:
        """`load` is Task.example, `build` PromptBuilder.build; `start`/`stop` are positions; `ahead` rows are held at
        most (absent: twice the threads)."""
        self.position = start
        self.dropped = 0
        self._load, self._build, self._order, self._data = load, build, order, data
        self._next, self._stop = start, stop
        self._ahead = 2 * data.media_workers if ahead is None else ahead
        if self._ahead < 1:
            raise ValueError(f"ahead must be at least 1, found {self._ahead}")
        self._jobs: deque[_Job] = deque()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"rollplex-media-{i}", daemon=True)
            for i in range(data.media_workers)
        ]
        for thread in self._threads:
            thread.start()
        self._submit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> tuple[Example, PromptSpec]:
        """The next prompt that is not dropped. Raises RowError, DeadlineError, or StopIteration at `stop`."""
        if self._closed.is_set():
            raise StateError("the prefetcher is closed; make a new one from its position")
        skipped = 0
        try:
            while self._jobs:
                job = self._jobs[0]
                self._await(job)
                if job.error is not None and not self._may_drop(job.error):
                    self._raise(job.row, job.error)
                self._jobs.popleft()
                self._submit()
                self.position += 1
                if job.error is None and job.example is not None and job.spec is not None:
                    return job.example, job.spec
                self.dropped += 1
                skipped += 1
                logger.info("dropped: %s", job.error)
                if skipped >= self._order.num_rows:
                    raise RowError(
                        f"row {job.row}: it and all {skipped} rows of an epoch are longer than data.max_prompt_tokens "
                        f"{self._data.max_prompt_tokens}; nothing is left to train on"
                    )
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Stop the threads after their current row and forget what was made ahead. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(_left(deadline))
        stuck = [job.row for job in self._jobs if job.started.is_set() and not job.finished.is_set()]
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("media threads still busy %.0f s after close, with rows %s", _JOIN_SECONDS, stuck)
        self._jobs.clear()

    def _may_drop(self, error: BaseException) -> bool:
        return isinstance(error, OverlongPromptError) and self._data.overlong == "drop"

    @staticmethod
    def _raise(row: int, error: BaseException) -> NoReturn:
        if isinstance(error, Exception) and not isinstance(error, RollplexError):
            # An error of a user's task knows nothing of rows: say which one it was.
            raise RowError(f"row {row}: {type(error).__name__}: {error}") from error
        raise error

    def _submit(self) -> None:
        while len(self._jobs) < self._ahead and (self._stop is None or self._next < self._stop):
            job = _Job(self._order.row_at(self._next))
            self._next += 1
            self._jobs.append(job)
            self._queue.put(job)

    def _await(self, job: _Job) -> None:
        """Wait for the oldest job. Workers take jobs in order, so it starts at once or has started."""
        limit = self._data.media_timeout_s
        if not job.started.wait(limit) or job.started_at is None:
            raise DeadlineError(f"row {job.row}: no media thread took it up within data.media_timeout_s={limit:g} s")
        if not job.finished.wait(_left(job.started_at + limit * _SLOW_FRACTION)):
            logger.warning(
                "row %d: its media are slow, not ready after %.1f s; data.media_timeout_s ends the wait after %g s",
                job.row,
                time.monotonic() - job.started_at,
                limit,
            )
        if not job.finished.wait(_left(job.started_at + limit)):
            raise DeadlineError(
                f"row {job.row}: its media and prompt were not ready after data.media_timeout_s={limit:g} s; "
                "raise the limit or mend the row"
            )

    def _work(self) -> None:
        while not self._closed.is_set() and (job := self._queue.get()) is not None:
            job.started_at = time.monotonic()
            job.started.set()
            try:
                job.example = self._load(job.row)
                job.spec = self._build(job.example)
            except BaseException as error:  # noqa: BLE001 - carried to the consumer, which raises it in its turn
                job.error = error
            finally:
                job.finished.set()
            del job  # its media would live on in a thread that waits


def _left(moment: float) -> float:
    """Seconds until `moment` on the monotonic clock, 0 when it has passed."""
    return max(0.0, moment - time.monotonic())
