"""The shares of a bound that benchmarks/overlap.py states: by steps, with an interval that noise widens."""

from __future__ import annotations

import numpy as np
import pytest

from overlap import share_of_bound


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
