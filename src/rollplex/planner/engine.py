"""A rollout engine in virtual time: rows that decode together, advanced from one end to the next, never token by token.

Between two changes of the set of rows a decode step takes a time that is linear in their contexts, and each row's
context grows by one token a step. So n steps take
    n (a + p P + c C - (p + c) b / 2) + (p + c) b n^2 / 2
seconds, with b rows, P tokens of context, C of them read, and a, p, c from `StepTable`; solved for n when a stretch is
cut short because something else has changed. Work per response: one push and one pop of a heap.
planner/decoding.py says when the responses of an engine end that has them all from the start and to itself;
`tests/unit/test_planner_engine.py` holds this module against it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from rollplex.planner.decoding import Rows, StepSeconds
from rollplex.planner.load import GroupLoad


class Coefficients(NamedTuple):
    """Seconds of a decode step: start + pairs x (sum of contexts) + cached x (tokens read)."""

    start: float
    pairs: float
    cached: float


class StepTable:
    """A time of decode steps as a line for each number of rows, through the step with typical contexts.

    Exact where the time is linear in both sums. A roofline has a kink where attention takes as long as reading the
    cache: contexts are then held to be on the side of the typical ones.

    step: seconds of a step. context_tokens: a row's typical context; read_tokens: what of it is read for this row, less
    where rows of a group share the reading of their prompt.
    """

    def __init__(self, step: StepSeconds, *, context_tokens: float, read_tokens: float | None = None):
        self._step, self._context = step, max(1.0, context_tokens)
        self._read = self._context if read_tokens is None else max(1.0, read_tokens)
        self._known: dict[int, Coefficients] = {}

    def of(self, rows: int) -> Coefficients:
        """The line for `rows` rows."""
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._line(rows)
        return found

    def _line(self, rows: int) -> Coefficients:
        pairs, cached, grown = rows * self._context, rows * self._read, 1.25

        def at(more_pairs: float = 1.0, more_cached: float = 1.0) -> float:
            return self._step(Rows(rows, 1, pairs * more_pairs, cached * more_cached))

        here = at()
        by_cached, by_both = at(more_cached=grown) - here, at(grown, grown) - here
        by_pairs = min(at(more_pairs=grown) - here, by_both - by_cached)  # on the kink both would count the same
        slope_pairs, slope_cached = by_pairs / (pairs * (grown - 1)), by_cached / (cached * (grown - 1))
        return Coefficients(here - slope_pairs * pairs - slope_cached * cached, slope_pairs, slope_cached)


@dataclass(slots=True)
class _Group:
    """A group inside the engine. `rows`: live and waiting ones."""

    key: object
    load: GroupLoad
    rows: int
    live: int = 0


@dataclass(slots=True)
class _Prefill:
    key: object
    left_s: float


class Engine:
    """Rows that decode together, groups that wait for a place, and prompts to take in, which hold up decoding.

    Times are the engine's own seconds: whoever slows it down stretches them. Keys are handed back as they came.

    places: rows that decode at once; None: as many as there are. shared_prompts: a prompt is read once a step for all
    rows of its group. scatter: rows wait in the order in which they came plus a random number below this one: requests
    that a router sends on at once do not reach an engine group by group. seed: of those numbers.
    """

    def __init__(
        self,
        table: StepTable,
        *,
        places: int | None = None,
        shared_prompts: bool = False,
        scatter: float = 0.0,
        seed: int = 0,
    ):
        self._table, self._shared = table, shared_prompts
        self._places = math.inf if places is None else places
        self._prefills: deque[_Prefill] = deque()
        self._waiting: list[tuple[float, int, int, _Group]] = []  # heap: place in the queue, tie, decode steps, group
        self._scatter, self._random = scatter, Random(seed)
        self._live: list[tuple[float, int, int, _Group]] = []  # heap: step at which a row ends, tie, its steps, group
        self._steps, self._pairs, self._cached = 0.0, 0.0, 0.0
        self._count, self._ended = 0, deque[object]()
        self._line = Coefficients(0.0, 0.0, 0.0)

    @property
    def active(self) -> bool:
        """Whether anything decodes, waits or is taken in."""
        return bool(self._live or self._prefills or self._ended or self._waiting)

    def prefill(self, key: object, seconds: float) -> None:
        """Take in a prompt; decoding stands still meanwhile."""
        self._prefills.append(_Prefill(key, seconds))

    def decode(self, key: object, load: GroupLoad) -> None:
        """Decode the responses of a group: those of n tokens need n - 1 steps, the first comes from the prompt."""
        group = _Group(key, load, len(load.responses))
        for tokens in load.responses:
            self._count += 1
            place = self._count + (self._scatter and self._scatter * self._random.random())
            heapq.heappush(self._waiting, (place, self._count, tokens - 1, group))
        self._admit()

    def until_next(self) -> float:
        """Own seconds until something ends; infinite when nothing runs."""
        if self._ended:
            return 0.0
        if self._prefills:
            return self._prefills[0].left_s
        return self._seconds(self._live[0][0] - self._steps) if self._live else math.inf

    def advance(self, seconds: float) -> None:
        """Let own seconds pass, fewer than `until_next`."""
        if self._prefills:
            self._prefills[0].left_s -= seconds
        elif self._live and seconds > 0:
            self._grow(min(self._steps_in(seconds), self._live[0][0] - self._steps))

    def end_next(self) -> object | None:
        """Go on to what ends next: the key of a prompt or group that is done; None for a row whose group goes on."""
        if not self._ended:
            if self._prefills:
                taken_in = self._prefills.popleft()
                self._admit()
                return taken_in.key
            until = self._live[0][0]
            self._grow(until - self._steps)
            self._steps = until
            self._retire(until)
        return self._ended.popleft() if self._ended else None

    def _retire(self, until: float) -> None:
        while self._live and self._live[0][0] <= until:
            _, _, steps, group = heapq.heappop(self._live)
            prompt = group.load.prompt.tokens
            group.live -= 1
            self._pairs -= prompt + steps + 1
            self._cached -= steps + 1 + (0 if self._shared and group.live else prompt)
            self._row_done(group)
        self._admit()

    def _admit(self) -> None:
        """Waiting rows into free places; not while prompts are taken in, when none could get on."""
        if self._prefills:
            return
        while self._waiting and len(self._live) < self._places:
            _, _, steps, group = heapq.heappop(self._waiting)
            if not steps:
                self._row_done(group)
                continue
            prompt = group.load.prompt.tokens
            self._pairs += prompt + 1
            self._cached += 1 + (0 if self._shared and group.live else prompt)
            group.live += 1
            self._count += 1
            heapq.heappush(self._live, (self._steps + steps, self._count, steps, group))
        self._line = self._table.of(len(self._live)) if self._live else self._line

    def _row_done(self, group: _Group) -> None:
        group.rows -= 1
        if not group.rows:
            self._ended.append(group.key)

    def _slopes(self) -> tuple[float, float]:
        """(first, second) of n x first + n^2 x second seconds for n steps."""
        start, pairs, cached = self._line
        growth = (pairs + cached) * len(self._live)
        return start + pairs * self._pairs + cached * self._cached - growth / 2, growth / 2

    def _seconds(self, steps: float) -> float:
        first, second = self._slopes()
        return steps * (first + second * steps)

    def _steps_in(self, seconds: float) -> float:
        first, second = self._slopes()
        if second <= 0:
            return seconds / first
        return 2 * seconds / (first + math.sqrt(first * first + 4 * second * seconds))

    def _grow(self, steps: float) -> None:
        self._steps += steps
        self._pairs += steps * len(self._live)
        self._cached += steps * len(self._live)
