"""Response lengths: draws, caps, seeds, and the log-normal behind a run's metrics."""

from __future__ import annotations

import numpy as np
import pytest

from rollplex.errors import ConfigError
from rollplex.models.shapes import shape_from_hf
from rollplex.planner.lengths import Empirical, Fixed, LogNormal, draw_groups, from_metrics
from rollplex.planner.load import Prompt, video_prompt

VISION = shape_from_hf({"model_type": "qwen2_5_vl"}, "defaults").vision


def test_fixed_and_empirical() -> None:
    rng = np.random.default_rng(0)
    assert set(Fixed(7).draw(5, rng)) == {7}
    assert set(Empirical((3, 9)).draw(200, rng)) == {3, 9}


def test_log_normal_is_capped_and_has_its_median() -> None:
    drawn = LogNormal(200, 0.5, cap=400).draw(20_000, np.random.default_rng(1))
    assert drawn.max() == 400 and drawn.min() >= 1
    assert np.median(drawn) == pytest.approx(200, rel=0.02)
    assert (drawn == 400).mean() == pytest.approx(0.083, abs=0.01)  # P(Z > ln 2 / 0.5)


@pytest.mark.parametrize("cap", [None, 600])
@pytest.mark.parametrize("sigma", [0.2, 0.8])
def test_the_spread_is_found_again_from_mean_and_longest(cap: int | None, sigma: float) -> None:
    true, rng = LogNormal(150, sigma, cap), np.random.default_rng(2)
    steps = [true.draw(64, rng) for _ in range(300)]
    rows = [{"completions/mean_length": s.mean(), "completions/max_length": float(s.max()), "loss": 0.0} for s in steps]
    found = from_metrics([*rows, {"eval_reward": 1.0}], responses_per_step=64, cap=cap)
    assert found.median == pytest.approx(150, rel=0.05)
    assert found.sigma == pytest.approx(sigma, rel=0.1)


def test_equal_lengths_have_no_spread() -> None:
    row = {"completions/mean_length": 32.0, "completions/max_length": 32.0}
    assert from_metrics([row], 8) == LogNormal(32.0, 0.0)


def test_metrics_without_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="completions/mean_length"):
        from_metrics([{"loss": 1.0}], 8)


def test_a_groups_lengths_do_not_depend_on_how_many_there_are() -> None:
    few, many = (draw_groups([Prompt(10)] * count, 4, LogNormal(100, 1.0), seed=3) for count in (2, 9))
    assert few == many[:2]
    assert few != draw_groups([Prompt(10)] * 2, 4, LogNormal(100, 1.0), seed=4)


def test_bad_numbers_are_refused() -> None:
    for make in (lambda: LogNormal(0, 1.0), lambda: Empirical(()), lambda: draw_groups([Prompt(1)], 0, Fixed(1), 0)):
        with pytest.raises(ConfigError):
            make()


def test_a_video_prompt_has_about_its_visual_tokens() -> None:
    prompt = video_prompt(8192, 8000, VISION)
    assert 0.95 * 8000 < prompt.patches / VISION.spatial_merge_size**2 <= 8000
    assert video_prompt(50, 0, VISION).grids == ()
    with pytest.raises(ValueError, match="visual_tokens"):
        video_prompt(50, 51, VISION)


def test_a_mean_close_to_the_cap() -> None:
    """Most responses cut: the log-normal behind them has its median over the cap."""
    rows = [{"completions/mean_length": 58.0, "completions/max_length": 64.0}]
    found = from_metrics(rows, 32, cap=64)
    assert float(np.mean(found.quantiles(4000))) == pytest.approx(58.0, rel=0.01)
    assert found.quantiles(32).max() == 64


def test_quantiles_are_spread_as_draws_are() -> None:
    lengths = LogNormal(100.0, 0.5, 150)
    drawn = np.sort(lengths.draw(20_000, np.random.default_rng(0)))
    quantiles = lengths.quantiles(100)
    assert quantiles == pytest.approx(drawn[100::200], rel=0.05)
    assert list(LogNormal(7.0, 0.0).quantiles(3)) == [7, 7, 7]


@pytest.mark.parametrize(
    ("mean", "longest", "cap"),
    [
        (float("nan"), 10.0, None),
        (3.0, float("inf"), None),
        (None, 10.0, None),
        ("12", 20.0, None),
        (0.0, 0.0, None),
        (-5.0, 10.0, None),
        (40.0, 30.0, None),
        (100.0, 128.0, 64),  # no log-normal that is cut at 64 has this mean: it was looked for without end
    ],
)
def test_rows_with_lengths_that_no_run_has_are_refused(mean: object, longest: object, cap: int | None) -> None:
    good = {"completions/mean_length": 20.0, "completions/max_length": 40.0}
    bad = {"completions/mean_length": mean, "completions/max_length": longest}
    with pytest.raises(ConfigError, match="leave that row out"):
        from_metrics([good, bad], 8, cap)
