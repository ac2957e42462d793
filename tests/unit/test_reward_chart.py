"""Rewards as text: heights follow values, bars line up, and the rise is what it says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.runtime.reward_chart import bucket_means, chart, rise, sparkline

rewards = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=300)


def test_rise_compares_the_first_and_last_ten() -> None:
    found = rise([0.0] * 10 + [99.0] * 5 + [1.0] * 10)
    assert found is not None
    assert (found.first, found.last, found.steps, found.difference) == (0.0, 1.0, 10, 1.0)


def test_rise_of_a_short_run_compares_halves_that_do_not_overlap() -> None:
    found = rise([0.0, 0.0, 5.0, 1.0, 1.0])
    assert found is not None
    assert (found.first, found.last, found.steps) == (0.0, 1.0, 2)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_no_rise_of_less_than_two_steps(values: list[float]) -> None:
    assert rise(values) is None


@given(rewards, st.integers(1, 100))
def test_buckets_keep_the_mean_of_all_values(values: list[float], width: int) -> None:
    means = bucket_means(values, width)
    assert len(means) == min(width, len(values))
    assert min(values) - 1e-9 <= min(means) and max(means) <= max(values) + 1e-9
    if len(values) % len(means) == 0:  # buckets of one size
        assert sum(means) / len(means) == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_buckets_leave_out_values_that_are_not_finite() -> None:
    assert bucket_means([1.0, math.nan, 3.0, math.inf], 10) == [1.0, 3.0]


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=40))
def test_sparkline_rises_where_values_rise(values: list[float]) -> None:
    line = sparkline(values, 40)
    assert len(line) == len(values)
    for (a, b), (x, y) in zip(zip(values, values[1:], strict=False), zip(line, line[1:], strict=False), strict=True):
        assert (a <= b) == (x <= y) or x == y


@given(rewards, st.integers(5, 60), st.integers(2, 12))
def test_chart_has_one_column_per_bucket_and_no_holes(values: list[float], width: int, height: int) -> None:
    lines = chart(values, width=width, height=height)
    assert len(lines) == height + 1
    bars = [line[10:].ljust(width) for line in lines[:-1]]
    columns = ["".join(row[index] for row in bars) for index in range(len(bucket_means(values, width)))]
    for column in columns:
        assert column.strip(), "a value without a bar looks like a missing step"
        assert " " not in column.lstrip(), "bars stand on the axis"
    tops = [len(column.strip()) for column in columns]
    assert max(tops) == height or len(set(bucket_means(values, width))) == 1


def test_chart_names_the_range_and_the_steps() -> None:
    lines = chart([0.25, 0.5, 0.75], height=3)
    assert lines[0].startswith("   0.750") and lines[2].startswith("   0.250")
    assert lines[-1].split() == ["step", "1", "step", "3"]


def test_chart_of_a_constant_names_no_value_but_its_own() -> None:
    lines = chart([0.5, 0.5, 0.5], height=4, ascii_only=True)
    assert [line.split("|")[0].strip() for line in lines[:-1]] == ["", "0.500", "", ""]
    assert [line.split("|")[1] for line in lines[:-1]] == ["", "@@@", "@@@", "@@@"]


def test_chart_in_ascii_has_nothing_else() -> None:
    text = "\n".join([*chart([0.0, 0.3, 1.0], ascii_only=True), sparkline([0.0, 0.3, 1.0], 9, ascii_only=True)])
    assert text.isascii()


def test_no_values_no_chart() -> None:
    assert chart([]) == [] and sparkline([], 10) == ""
