"""How long responses are: fixed, log-normal, or as a run had them; and groups drawn from that.

A `metrics.jsonl` holds the mean and the longest of each step's responses, not every length. `from_metrics` fits a
log-normal to them: its mean is the mean of all steps, and its spread is the one whose expected longest of a step is
what the steps' longest were on average, with lengths over the cap cut to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from rollplex.errors import ConfigError
from rollplex.planner.load import GroupLoad, Prompt

# Quantiles at which an expected maximum is taken; the error of the mean over them is far below a token.
_GRID = (np.arange(2000) + 0.5) / 2000
_MEAN, _MOST = "completions/mean_length", "completions/max_length"


class Lengths(Protocol):
    """A distribution of response lengths in tokens."""

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths, each at least 1."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every response has `tokens` tokens."""

    tokens: int

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.full(count, max(1, self.tokens), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(log median, sigma^2)), rounded, at least 1 and at most `cap` (max_completion_length)."""

    median: float
    sigma: float
    cap: int | None = None

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma >= 0 and (self.cap is None or self.cap >= 1)):
            raise ConfigError(f"a log-normal needs a median above 0, sigma at least 0 and a cap above 0, found {self}")

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._at(rng.standard_normal(count))

    def quantiles(self, count: int) -> NDArray[np.int64]:
        """`count` lengths that are spread as the distribution is, in rising order: its (i + 1/2) / count quantiles."""
        return self._at(norm.ppf((np.arange(count) + 0.5) / count))

    def _at(self, deviations: NDArray[np.float64]) -> NDArray[np.int64]:
        drawn = np.rint(self.median * np.exp(self.sigma * deviations))
        return np.clip(drawn, 1, self.cap).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths drawn with replacement from those that were seen."""

    seen: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.seen or min(self.seen) < 1:
            raise ConfigError(f"empirical lengths need at least one length, each 1 or more, found {self.seen[:5]}")

    def draw(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.choice(np.asarray(self.seen, dtype=np.int64), size=count)


def from_metrics(rows: Sequence[Mapping[str, Any]], responses_per_step: int, cap: int | None = None) -> LogNormal:
    """The log-normal behind rows of a run's metrics.jsonl (their `completions/mean_length` and `max_length`).

    Raises ConfigError when no row has both, and for lengths that no run has: no numbers, no token, a mean above the
    longest, or lengths above the cap.
    """
    found = [(row[_MEAN], row[_MOST]) for row in rows if _MEAN in row and _MOST in row]
    if not found:
        raise ConfigError(f"no row of the metrics has {_MEAN} and {_MOST}; give the metrics.jsonl of a run")
    for pair in found:
        _check_lengths(*pair, cap)
    mean, longest = (float(np.mean([pair[i] for pair in found])) for i in (0, 1))
    if longest <= mean * 1.001 or responses_per_step < 2:
        return LogNormal(mean, 0.0, cap)
    top = norm.ppf(_GRID ** (1.0 / responses_per_step))  # the longest of a step, in standard deviations
    every = norm.ppf(_GRID)

    def capped(median: float, sigma: float, at: NDArray[np.float64]) -> float:
        return float(np.minimum(median * np.exp(sigma * at), math.inf if cap is None else cap).mean())

    def median_for(sigma: float) -> float:
        low, high = mean * math.exp(-sigma * sigma) / 4, mean * 8
        while capped(high, sigma, every) < mean:  # a mean near the cap: most lengths are cut
            high *= 8
        return float(brentq(lambda median: capped(median, sigma, every) - mean, low, high))

    widest = 3.0
    if capped(median_for(widest), widest, top) <= longest:
        return LogNormal(median_for(widest), widest, cap)
    sigma = float(brentq(lambda s: capped(median_for(s), s, top) - longest, 1e-6, widest))
    return LogNormal(median_for(sigma), sigma, cap)


def _check_lengths(mean: Any, most: Any, cap: int | None) -> None:
    numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (mean, most))
    if not numbers or not 0 < mean <= most * (1 + 1e-6) or (cap is not None and most > cap):
        limit = "" if cap is None else f" of at most {cap} tokens (rollout.max_completion_length)"
        raise ConfigError(
            f"a row of the metrics has {_MEAN} {mean!r} and {_MOST} {most!r}; needed lengths{limit}, the mean above 0 "
            "and not above the longest; leave that row out"
        )


def draw_groups(prompts: Sequence[Prompt], generations: int, lengths: Lengths, seed: int) -> tuple[GroupLoad, ...]:
    """One group per prompt. A group's lengths depend on `seed` and its place, not on how many groups there are."""
    if generations < 1:
        raise ConfigError(f"generations is {generations}, needed 1 or more")
    return tuple(
        GroupLoad(prompt, tuple(int(n) for n in lengths.draw(generations, np.random.default_rng((seed, place)))))
        for place, prompt in enumerate(prompts)
    )
