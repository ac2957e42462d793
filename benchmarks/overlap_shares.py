"""Of measured steps: what could be hidden beside decoding, and what share of it was. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from rollplex.trace import Span

RESAMPLES, INTERVAL = 10_000, (5, 95)  # of the bootstrap, percent
STREAMED = ("ref_response", "actor_response", "prefix_backward")
PREFIXES = ("ref_prefix", "actor_prefix")


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step."""

    seconds: float
    decode_s: float
    exposed_prefix_s: float  # prefix passes with the device to themselves, and waits for those beside decoding
    spans: tuple[Span, ...]
    iterations: tuple[tuple[float, float], ...] = ()  # of the engine: begin and end


def phase_seconds(steps: Sequence[Step]) -> dict[str, float]:
    """Median seconds of each phase that had the device to itself, all units together."""
    names = {span.name for step in steps for span in step.spans if span.lane == "main"}
    return {
        str(name): median(sum(s.seconds for s in step.spans if s.name == name and s.lane == "main") for step in steps)
        for name in names
    }


def slowness(pairs: Sequence[tuple[Step, Step]]) -> dict[str, float]:
    """How much longer each phase takes on one core than on two, from pairs of (two cores, one core)."""
    two, one = (phase_seconds(steps) for steps in zip(*pairs, strict=True))
    return {name: one[name] / two[name] for name in two if name in one and two[name] > 0}


def bounds(serial: Sequence[Step], slow: Mapping[str, float], *, streaming: bool) -> NDArray[np.float64]:
    """Most seconds of each step that hiding can save: what one otherwise idle core does, work never waiting, until the
    last response ends. Prefixes can start with decoding, passes of a unit's responses when the unit is complete."""
    return np.array([_bound_of(step, slow, streaming=streaming) for step in serial])


def share_of_bound(saved_s: NDArray[np.float64], bounds_s: NDArray[np.float64]) -> tuple[float, float, float]:
    """1 + `part_of_bound` of saving - bound: step by step, since what there is to hide differs."""
    share, low, high = part_of_bound(saved_s - bounds_s, bounds_s)
    return 1 + share, 1 + low, 1 + high


def part_of_bound(seconds: NDArray[np.float64], bounds_s: NDArray[np.float64]) -> tuple[float, float, float]:
    """median(seconds) / median(bound), and its 90 % interval by resampling steps (not the few that tell how much longer
    passes take on one core)."""

    def part(seconds: NDArray[np.float64], bounds_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Over the last axis."""
        found: NDArray[np.float64] = np.median(seconds, axis=-1) / np.median(bounds_s, axis=-1)
        return found

    drawn = np.random.default_rng(0).integers(len(seconds), size=(RESAMPLES, len(seconds)))
    low, high = np.percentile(part(seconds[drawn], bounds_s[drawn]), INTERVAL)
    return float(part(seconds, bounds_s)), float(low), float(high)


def alike(pairs: Sequence[tuple[Step, Step]]) -> NDArray[np.float64]:
    """Seconds by which the first of each pair was slower in what both did with the device to themselves: passes, and
    engine iterations."""
    found = []
    for one, other in pairs:
        mine, theirs = alone_seconds(one.spans), alone_seconds(other.spans)
        passes = sum(mine[key] - theirs[key] for key in mine.keys() & theirs.keys())
        beside = with_pass_beside(one) | with_pass_beside(other)
        both = enumerate(zip(one.iterations, other.iterations, strict=True))
        decoding = sum((a[1] - a[0]) - (b[1] - b[0]) for number, (a, b) in both if number not in beside)
        found.append(passes + decoding)
    return np.array(found)


def slowdown_by_pass(pairs: Sequence[tuple[Step, Step]]) -> dict[str, float]:
    """How many times as long engine iterations take with each kind of pass beside them from begin to end, all together:
    those of the second of each pair over the same ones of the first."""
    seconds: dict[str, list[float]] = {}
    for one, other in pairs:
        passes = [span for span in other.spans if span.lane == "window"]
        for alone, (begin_s, end_s) in zip(one.iterations, other.iterations, strict=True):
            for span in passes:
                if span.start_s <= begin_s and end_s <= span.end_s:
                    both = seconds.setdefault(str(span.name), [0.0, 0.0])
                    both[0] += alone[1] - alone[0]
                    both[1] += end_s - begin_s
    return {name: beside / alone for name, (alone, beside) in seconds.items()}


def with_pass_beside(step: Step) -> set[int]:
    """Numbers of the engine iterations that had a pass of the window beside them, and of each next one, which finds
    caches as that pass left them."""
    passes = [(span.start_s, span.end_s) for span in step.spans if span.lane == "window"]
    found = {
        number
        for number, (begin_s, end_s) in enumerate(step.iterations)
        if any(start_s < end_s and begin_s < stop_s for start_s, stop_s in passes)
    }
    return found | {number + 1 for number in found}


def alone_seconds(spans: Sequence[Span]) -> dict[tuple[str, int | None], float]:
    """Seconds of each pass that had the device to itself, by phase and first prompt of its unit."""
    seconds: dict[tuple[str, int | None], float] = {}
    for span in spans:
        if span.lane == "main":
            key = (str(span.name), span.group)
            seconds[key] = seconds.get(key, 0.0) + span.seconds
    return seconds


def _bound_of(step: Step, slow: Mapping[str, float], *, streaming: bool) -> float:
    decodes = [span for span in step.spans if span.name == "decode"]
    begin_s = min(span.start_s for span in decodes)
    window_s = max(span.end_s for span in decodes) - begin_s
    main = [span for span in step.spans if span.lane == "main"]
    firsts = sorted({int(span.group) for span in main if span.group is not None})  # a unit is filed under its first
    complete_s: dict[int | None, float] = {}
    for span in decodes:
        unit = firsts[bisect_right(firsts, int(span.group or 0)) - 1]
        complete_s[unit] = max(complete_s.get(unit, 0.0), span.end_s - begin_s)
    jobs = [(0.0, span.seconds, slow[span.name]) for span in main if span.name in PREFIXES]
    if streaming:
        jobs += [(complete_s[span.group], span.seconds, slow[span.name]) for span in main if span.name in STREAMED]
    now_s = saved_s = 0.0
    for release_s, seconds, factor in sorted(jobs):
        now_s = max(now_s, release_s)
        share = min(1.0, max(0.0, window_s - now_s) / (seconds * factor))
        saved_s += share * seconds
        now_s += share * seconds * factor
    return saved_s
