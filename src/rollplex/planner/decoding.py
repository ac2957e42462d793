"""When the responses of an engine end: rows are decoded together, and the time of a step depends on all of them.

Between two ends the set of rows stays the same and contexts grow by one token a step, so a stretch of steps is summed
at once (Simpson's rule: exact for a time that is linear in the contexts, which it is but for one kink).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollplex.planner.load import GroupLoad


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one decode step."""

    rows: int
    prompts: int  # groups they belong to
    pairs: float  # sum of the rows' contexts
    cached_tokens: float  # tokens whose keys and values are read

    def later(self, steps: float) -> Rows:
        """After `steps` more tokens of each row."""
        grown = steps * self.rows
        return Rows(self.rows, self.prompts, self.pairs + grown, self.cached_tokens + grown)


StepSeconds = Callable[[Rows], float]
"""Seconds of one decode step."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Seconds from the first step to the last token of each group, and to that of each response."""

    groups: tuple[float, ...]
    responses: tuple[tuple[float, ...], ...]
    steps: int  # decode steps of the engine


def decode_ends(
    groups: Sequence[GroupLoad], step: StepSeconds, *, shared_prompts: bool, max_rows: int | None = None
) -> Ends:
    """Decode all responses of `groups` on one engine, waiting rows taking free places in order.

    shared_prompts: a prompt's keys and values are read once a step for all its rows, as rollout/two_level.py does; off:
    once for each row, as paged attention does. Prompt passes are not counted here. A response of n tokens needs n - 1
    steps: its first token comes from the prompt.
    """
    state = _Engine(groups, step, shared_prompts, max_rows or sum(len(g.responses) for g in groups))
    while state.live or state.waiting:
        state.admit()
        state.advance()
    ends = tuple(tuple(row) for row in state.ends)
    return Ends(tuple(max(row) for row in ends), ends, state.done)


class _Engine:
    """Live rows as a heap of (step at which they end, group, response)."""

    def __init__(self, groups: Sequence[GroupLoad], step: StepSeconds, shared: bool, places: int):
        self.groups, self.step, self.shared, self.places = groups, step, shared, places
        self.ends = [[0.0] * len(group.responses) for group in groups]
        self.waiting = [(g, r) for g, group in enumerate(groups) for r in range(len(group.responses))][::-1]
        self.live: list[tuple[int, int, int]] = []
        self.members = [0] * len(groups)
        self.prompts = 0
        self.prompt_pairs = self.prompt_reads = self.suffix = 0.0
        self.done, self.now_s = 0, 0.0

    def admit(self) -> None:
        """Waiting rows into free places."""
        while self.waiting and len(self.live) < self.places:
            g, r = self.waiting.pop()
            steps = self.groups[g].responses[r] - 1
            if steps == 0:
                self.ends[g][r] = self.now_s
                continue
            heapq.heappush(self.live, (self.done + steps, g, r))
            self._count(g, 1)
            self.suffix += 1

    def advance(self) -> None:
        """Up to the next end."""
        if not self.live:
            return
        until = self.live[0][0]
        steps = until - self.done
        first = Rows(len(self.live), self.prompts, self.prompt_pairs + self.suffix, self.prompt_reads + self.suffix)
        self.now_s += _sum_of_steps(self.step, first, steps)
        self.suffix += steps * len(self.live)
        self.done = until
        while self.live and self.live[0][0] == until:
            _, g, r = heapq.heappop(self.live)
            self.ends[g][r] = self.now_s
            self._count(g, -1)
            self.suffix -= self.groups[g].responses[r]

    def _count(self, g: int, sign: int) -> None:
        tokens = self.groups[g].prompt.tokens
        before, self.members[g] = self.members[g], self.members[g] + sign
        opened = bool(self.members[g]) - bool(before)
        self.prompts += opened
        self.prompt_pairs += sign * tokens
        self.prompt_reads += (opened if self.shared else sign) * tokens


def _sum_of_steps(step: StepSeconds, first: Rows, steps: int) -> float:
    """Seconds of `steps` steps of the same rows. Example: one step costs step(first)."""
    if steps <= 2:
        return sum(step(first.later(i)) for i in range(steps))
    last = steps - 1
    return steps * (step(first) + 4 * step(first.later(last / 2)) + step(first.later(last))) / 6
