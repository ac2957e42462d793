"""The shares of a bound that benchmarks/overlap.py states: by steps, with an interval that noise widens."""

from __future__ import annotations

import numpy as np
import pytest

from overlap import alone_seconds, share_of_bound
from rollplex.trace import Span


def test_steps_that_hide_all_their_bounds_have_the_whole_share_whatever_the_bounds() -> None:
    bounds_s = np.array([0.1, 0.9, 0.4, 0.5, 0.2])
    assert share_of_bound(bounds_s, bounds_s) == pytest.approx((1.0, 1.0, 1.0))


def test_half_of_each_bound_is_half_a_share() -> None:
    bounds_s = np.full(9, 0.4)
    assert share_of_bound(bounds_s / 2, bounds_s) == pytest.approx((0.5, 0.5, 0.5))


def test_noise_widens_the_interval_around_the_share() -> None:
    rng = np.random.default_rng(1)
    bounds_s, quiet, loud = np.full(25, 0.5), rng.normal(0, 0.01, 25), rng.normal(0, 0.5, 25)
    near, far = share_of_bound(bounds_s + quiet, bounds_s), share_of_bound(bounds_s + loud, bounds_s)
    assert near[1] <= near[0] <= near[2]
    assert far[2] - far[1] > 10 * (near[2] - near[1])


def test_what_both_arms_did_alone_is_matched_by_phase_and_unit() -> None:
    def span(name: str, lane: str, seconds: float, group: int | None) -> Span:
        return Span(name, lane, 1.0, 1.0 + seconds, 0, group)

    spans = [span("prefill", "main", 0.5, 4), span("prefill", "main", 0.25, 5), span("ref_prefix", "window", 1.0, 4)]
    spans += [span("decode", "decode", 2.0, 4), span("optimizer", "main", 0.125, None)]
    assert alone_seconds(spans) == {("prefill", 4): 0.5, ("prefill", 5): 0.25, ("optimizer", None): 0.125}
