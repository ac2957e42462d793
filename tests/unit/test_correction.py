"""Mismatch correction: modes, raw ratios before the cut, exact merging."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.config_algorithm import CorrectionMode
from rollplex.train.correction import Correction, merge_stats, mismatch_correction

MODES: tuple[CorrectionMode, ...] = get_args(CorrectionMode)


def correct(
    gaps: list[list[float]], mode: CorrectionMode, clip_max: float = 3.0, out: tuple[int, ...] = ()
) -> Correction:
    """gaps: logp - sampling logp, per response and token."""
    flat = torch.tensor([g for row in gaps for g in row], dtype=torch.float64)
    row_T = torch.tensor([i for i, row in enumerate(gaps) for _ in row])
    counts_N = torch.tensor([i not in out for i in range(len(gaps))])
    base = torch.full_like(flat, -2.0)
    return mismatch_correction(base, base - flat, row_T, counts_N, mode=mode, clip_max=clip_max)


LOG2 = math.log(2.0)
GAPS = [[LOG2, LOG2], [-LOG2], [0.0, 2 * LOG2, 0.0]]  # token ratios 2 2 | 0.5 | 1 4 1; sequence 4 | 0.5 | 4


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token_truncate", [2, 2, 0.5, 1, 3, 1]),
        ("token_mask", [2, 2, 0.5, 1, 0, 1]),
        ("sequence_truncate", [3, 3, 0.5, 3, 3, 3]),
        ("sequence_mask", [0, 0, 0.5, 0, 0, 0]),
    ],
)
def test_weights(mode: CorrectionMode, weights: list[float]) -> None:
    result = correct(GAPS, mode)
    assert result.weight_T is not None and not result.weight_T.requires_grad
    assert result.weight_T.tolist() == pytest.approx(weights)


def test_a_ratio_at_the_limit_is_kept() -> None:
    ratio = torch.tensor([2.0], dtype=torch.float64).log()
    zero, row, counts = torch.zeros(1, dtype=torch.float64), torch.tensor([0]), torch.tensor([True])
    limit = float(ratio.exp())
    result = mismatch_correction(ratio, zero, row, counts, mode="token_mask", clip_max=limit)
    assert result.weight_T is not None and result.weight_T.tolist() == [limit]


def test_off_measures_but_returns_no_weight() -> None:
    result = correct(GAPS, "off")
    metrics = result.stats.metrics()
    assert result.weight_T is None
    assert metrics["sampling/raw_ratio/max"] == pytest.approx(4)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(4)
    assert metrics["sampling/truncated_fraction"] == metrics["sampling/masked_fraction"] == 0


@pytest.mark.parametrize("mode", [m for m in MODES if m != "off"])
def test_G23_raw_ratios_are_logged_before_the_cut(mode: CorrectionMode) -> None:
    """G23: a known offset in the rollout's log-probs shows in raw min/mean/max, sample size and the fraction cut."""
    gaps = [[0.0] * 4, [LOG2] * 2, [3 * LOG2] * 1, [-LOG2] * 3]
    per_sequence = mode.startswith("sequence")
    raw = [1.0, 4.0, 8.0, 0.125] if per_sequence else [1.0] * 4 + [2.0] * 2 + [8.0] + [0.5] * 3
    metrics = correct(gaps, mode, clip_max=3.0).stats.metrics()
    assert metrics["sampling/raw_ratio/min"] == pytest.approx(min(raw))
    assert metrics["sampling/raw_ratio/mean"] == pytest.approx(sum(raw) / len(raw))
    assert metrics["sampling/raw_ratio/max"] == pytest.approx(8.0)
    ess = sum(raw) ** 2 / (len(raw) * sum(r * r for r in raw))
    assert metrics["sampling/effective_sample_size"] == pytest.approx(ess)
    cut = sum(r > 3 for r in raw) / len(raw)
    truncated, masked = (cut, 0.0) if mode.endswith("truncate") else (0.0, cut)
    assert metrics["sampling/truncated_fraction"] == pytest.approx(truncated)
    assert metrics["sampling/masked_fraction"] == pytest.approx(masked)
    applied = [min(r, 3.0) if mode.endswith("truncate") else r * (r <= 3) for r in raw]
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(applied) / len(applied))
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(3 * LOG2)


def test_left_out_responses_stay_out_of_the_stats() -> None:
    for mode in MODES:
        with_it = correct([*GAPS, [9.0, 9.0]], mode, out=(3,)).stats
        assert with_it.metrics() == pytest.approx(correct(GAPS, mode).stats.metrics())
    assert correct(GAPS, "token_mask", out=(0, 1, 2)).stats.metrics() == {}


def test_missing_sampling_logps_count_as_ratio_one_and_are_reported() -> None:
    result = correct([[LOG2, math.nan], [0.0]], "sequence_truncate")
    assert result.weight_T is not None and result.weight_T.tolist() == pytest.approx([2, 2, 1])
    metrics = result.stats.metrics()
    assert metrics["sampling/missing_logp_fraction"] == pytest.approx(1 / 3)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(LOG2 / 2)


def test_overflowing_sequence_ratio_is_cut_and_still_measured() -> None:
    gaps = [[2.0] * 600, [0.0]]
    for mode, kept in (("sequence_truncate", 3.0), ("sequence_mask", 0.0)):
        result = correct(gaps, mode)  # type: ignore[arg-type]
        assert result.weight_T is not None and result.weight_T[0].item() == kept
        metrics = result.stats.metrics()
        assert metrics["sampling/raw_ratio/max"] == math.inf
        assert metrics["sampling/effective_sample_size"] == pytest.approx(0.5)
        assert math.isfinite(metrics["sampling/importance_sampling_ratio/mean"])


gap_rows = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=60)
@given(gaps=gap_rows, mode=st.sampled_from(MODES), data=st.data())
def test_stats_merge_exactly_over_any_partition(gaps: list[list[float]], mode: CorrectionMode, data: Any) -> None:
    owner = [data.draw(st.integers(0, 2)) for _ in gaps]
    parts = [[g for g, o in zip(gaps, owner, strict=True) if o == part] for part in range(3)]
    merged = merge_stats(correct(part, mode).stats for part in parts if part)
    assert merged.metrics() == pytest.approx(correct(gaps, mode).stats.metrics(), rel=1e-12, abs=1e-12)
    assert 0 < merged.metrics()["sampling/effective_sample_size"] <= 1 + 1e-12


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="token_clip"):
        correct(GAPS, "token_clip")  # type: ignore[arg-type]
