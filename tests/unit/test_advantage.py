"""Advantages: definitions, None rewards, groups of one, group borders. The comparison with TRL is in tests/numerics."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.train.advantage import compute_advantages, estimator_of, has_spread, reward_metrics

rewards = st.lists(
    st.lists(st.one_of(st.none(), st.floats(-100, 100, width=32)), min_size=1, max_size=6), min_size=1, max_size=5
)
ESTIMATORS = [("group", "group"), ("group", "batch"), ("group", "none"), ("rloo", "none"), ("reinforce_pp", "none")]


def advantages(groups: Any, estimator: Any, scale: Any = "group", **more: Any) -> Any:
    if estimator == "reinforce_pp":
        more.setdefault("lengths", [[2] * len(group) for group in groups])
    return compute_advantages(groups, estimator=estimator, scale_rewards=scale, **more)


def test_group_relative_is_reward_minus_mean_over_sample_deviation() -> None:
    group, other = [1.0, 2.0, 4.0], [0.0, 10.0]
    std, batch = statistics.stdev(group), statistics.stdev(group + other)
    for scale, divisor in (("group", std + 1e-4), ("batch", batch + 1e-4), ("none", 1.0)):
        values = advantages([group, other], "group", scale).values
        assert values[0] == pytest.approx([(r - 7 / 3) / divisor for r in group], rel=1e-12)


def test_rloo_baseline_is_the_mean_of_the_others() -> None:
    assert advantages([[1.0, 2.0, 6.0]], "rloo").values[0] == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert advantages([[1.0, None, 6.0]], "rloo").values[0] == pytest.approx([-5, 0, 5])


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch() -> None:
    groups, lengths = [[1.0, 0.0], [3.0, None]], [[4, 1], [2, 7]]
    per_token = [1.0] * 4 + [0.0] + [3.0] * 2
    mean, std = statistics.fmean(per_token), statistics.pstdev(per_token)
    values = advantages(groups, "reinforce_pp", lengths=lengths).values
    assert values[0] == pytest.approx([(1 - mean) / std, -mean / std])
    assert values[1] == pytest.approx([(3 - mean) / std, 0.0])
    assert sum(v * n for group, counts in zip(values, lengths, strict=True) for v, n in
               zip(group, counts, strict=True)) == pytest.approx(0, abs=1e-12)  # fmt: skip
    # a response that is left out of the loss (no counted tokens) does not move the statistics
    assert advantages([[1.0, 0.0, 99.0], [3.0]], "reinforce_pp", lengths=[[4, 1, 0], [2]]).values[1] == values[1][:1]
    with pytest.raises(ValueError, match="length"):
        compute_advantages(groups, estimator="reinforce_pp")


@pytest.mark.parametrize(("estimator", "scale"), ESTIMATORS)
@given(groups=rewards)
def test_none_is_zero_and_everything_is_finite(estimator: Any, scale: Any, groups: Any) -> None:
    result = advantages(groups, estimator, scale)
    assert [len(v) for v in result.values] == [len(g) for g in groups]
    for group, values in zip(groups, result.values, strict=True):
        assert all(math.isfinite(v) for v in values)
        assert all(v == 0 for r, v in zip(group, values, strict=True) if r is None)
        if estimator != "reinforce_pp":
            assert sum(values) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("estimator", "scale"), ESTIMATORS[:4])
@given(groups=rewards, others=rewards)
def test_group_order_and_neighbours_do_not_matter(estimator: Any, scale: Any, groups: Any, others: Any) -> None:
    if scale == "batch":
        others = []
    together = advantages([*others, *groups[::-1]], estimator, scale).values[len(others) :][::-1]
    for mine, alone in zip(together, advantages(groups, estimator, scale).values, strict=True):
        assert mine == pytest.approx(alone, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("estimator", "scale"), ESTIMATORS[:4])
@given(constants=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6), size=st.integers(1, 9))
def test_G22_rewards_equal_to_a_prompt_constant_give_exactly_zero(
    estimator: Any, scale: Any, constants: list[float], size: int
) -> None:
    """G22: several prompts on one device, each response of a prompt with the same reward."""
    result = advantages([[constant] * size for constant in constants], estimator, scale)
    assert all(value == 0.0 for group in result.values for value in group)
    assert all(result.zero_std)


@given(constant=st.floats(-1e6, 1e6), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_reinforce_pp_of_one_constant_is_exactly_zero(constant: float, sizes: list[int]) -> None:
    result = advantages([[constant] * n for n in sizes], "reinforce_pp")
    assert all(value == 0.0 for group in result.values for value in group)


def test_groups_of_one_and_without_rewards() -> None:
    for estimator, scale in ESTIMATORS[:4]:
        assert advantages([[5.0], [7.0]], estimator, scale).values == ((0.0,), (0.0,))
    assert advantages([[5.0], [7.0]], "reinforce_pp").values == ((-1.0,), (1.0,))
    empty = advantages([[None, None]], "group")
    assert empty.values == ((0.0, 0.0),) and empty.zero_std == (True,) and empty.frac_reward_zero_std == 0.0
    assert reward_metrics([[None, None]], [{"f": (None, None)}], empty) == {"frac_reward_zero_std": 0.0}


def test_kl_in_reward_is_subtracted_before_the_baseline_but_not_in_the_metrics() -> None:
    groups, kl = [[1.0, 1.0, None]], [[0.0, 2.0, 50.0]]
    result = compute_advantages(groups, estimator="rloo", beta=0.5, kl=kl)
    assert result.values == ((1.0, -1.0, 0.0),)
    assert result.zero_std == (False,) and result.frac_reward_zero_std == 0.0
    assert reward_metrics(groups, [{"f": (1.0, 1.0, None)}], result)["reward_std"] == 0.0


def test_zero_std_fraction_counts_responses() -> None:
    result = advantages([[1.0, 1.0, 1.0], [0.0, 1.0]], "group")
    assert result.zero_std == (True, False) and result.frac_reward_zero_std == pytest.approx(3 / 5)
    assert advantages([[1.0, 1.0], [0.0, 0.0]], "group", "batch").frac_reward_zero_std == 0.0


def test_metrics_leave_out_functions_that_did_not_apply() -> None:
    groups = [[1.0, 3.0], [2.0, 6.0]]
    parts = [{"a": (1.0, None), "b": (None, 3.0)}, {"a": (2.0, 6.0), "b": (None, None)}]
    metrics = reward_metrics(groups, parts, advantages(groups, "group"))
    assert metrics["rewards/a/mean"] == 3.0 and metrics["rewards/b/mean"] == 3.0
    assert metrics["rewards/a/std"] == pytest.approx(statistics.stdev([1, 2, 6]))
    assert "rewards/b/std" not in metrics and metrics["reward"] == 3.0


def test_has_spread() -> None:
    assert has_spread([0.0, None, 1.0])
    assert not any(has_spread(group) for group in ([], [None], [1.0], [2.0, 2.0, None]))


def test_estimator_of_loss_type() -> None:
    assert [estimator_of(name) for name in ("dapo", "gspo", "cispo", "rloo", "reinforce_pp")] == [
        "group", "group", "group", "rloo", "reinforce_pp",
    ]  # fmt: skip


def test_module_needs_no_torch() -> None:
    program = "import sys, rollplex.train.advantage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
