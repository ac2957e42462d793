"""Losses: closed forms, exact shares over any partition, masks, on-policy behaviour. TRL parity: tests/numerics."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.config_algorithm import AlgorithmConfig
from rollplex.errors import ConfigError
from rollplex.train.loss import LossBatch, LossSettings, LossTotals, policy_loss
from rollplex.train.metric_sums import MetricSums, merge_metrics

LOSSES = get_args(AlgorithmConfig.model_fields["loss_type"].annotation)
MAX_LENGTH = 9


def settings_of(loss_type: str, **options: Any) -> LossSettings:
    if loss_type == "cispo":
        options = {**options, "epsilon_high": 1.1, "delta": None}
    return LossSettings.from_config(AlgorithmConfig(loss_type=loss_type, **options), MAX_LENGTH)  # type: ignore[arg-type]


def random_batch(lengths: list[int], counts: list[bool], seed: int = 0, weights: bool = False) -> LossBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    tokens = sum(lengths)
    logp = -draw(tokens).abs()
    return LossBatch(
        logp_T=logp,
        old_logp_T=logp + 0.3 * draw(tokens),
        ref_logp_T=logp + 0.3 * draw(tokens),
        advantage_N=draw(len(lengths)),
        row_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        counts_N=torch.tensor(counts),
        weight_T=draw(tokens).abs() if weights else None,
        entropy_T=draw(tokens).abs(),
    )


def take(batch: LossBatch, rows: list[int]) -> tuple[LossBatch, torch.Tensor]:
    """A micro-batch of some responses, in the given order, and where its tokens stood."""
    where = torch.cat([torch.nonzero(batch.row_T == row).flatten() for row in rows])
    new_row = {row: i for i, row in enumerate(rows)}
    fields = {
        f.name: value[where]
        for f in dataclasses.fields(batch)
        if f.name.endswith("_T") and (value := getattr(batch, f.name)) is not None
    }
    fields["row_T"] = torch.tensor([new_row[int(r)] for r in batch.row_T[where]])
    return LossBatch(**fields, advantage_N=batch.advantage_N[rows], counts_N=batch.counts_N[rows]), where


def loss_and_grad(batch: LossBatch, totals: LossTotals, how: LossSettings) -> tuple[float, torch.Tensor, MetricSums]:
    logp = batch.logp_T.clone().requires_grad_()
    result = policy_loss(dataclasses.replace(batch, logp_T=logp), totals, how)
    result.loss.backward()
    assert logp.grad is not None
    return result.loss.item(), logp.grad, result.metrics


responses = st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 3)), min_size=1, max_size=8)


@settings(max_examples=150)
@given(
    rows=responses,
    loss_type=st.sampled_from(LOSSES),
    level=st.sampled_from(["token", "sequence"]),
    delta=st.sampled_from([None, 1.4]),
    beta=st.sampled_from([0.0, 0.04]),
    by_ratio=st.booleans(),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    weights=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_micro_batch_shares_add_up_for_any_partition(
    *, rows: list[tuple[int, bool, int]], loss_type: str, level: str, delta: float | None, beta: float, by_ratio: bool,
    estimator: str,    weights: bool, seed: int,
) -> None:  # fmt: skip
    """Loss, gradient and every metric of the sum of shares equal those of the whole step."""
    lengths, counts, owner = [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]
    batch = random_batch(lengths, counts, seed, weights)
    how = settings_of(
        loss_type, importance_sampling_level=level, delta=delta, beta=beta, use_bias_correction_kl=by_ratio,
        kl_estimator=estimator,
    )  # fmt: skip
    totals = LossTotals.of_step(lengths, counts, rollout_tokens=40, steps_per_generation=2)
    whole_loss, whole_grad, whole_metrics = loss_and_grad(batch, totals, how)
    grad, total, parts = torch.zeros_like(whole_grad), 0.0, []
    for part in range(4):
        mine = [i for i, o in enumerate(owner) if o == part]
        if mine:
            micro, where = take(batch, mine)
            loss, part_grad, metrics = loss_and_grad(micro, totals, how)
            grad[where] += part_grad
            total += loss
            parts.append(metrics)
    assert total == pytest.approx(whole_loss, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(grad, whole_grad, rtol=1e-12, atol=1e-15)
    merged = merge_metrics(parts).values()
    assert merged == pytest.approx(whole_metrics.values(), rel=1e-12, abs=1e-14)
    assert merged["loss"] == pytest.approx(whole_loss, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    ("loss_type", "normaliser"),
    [
        ("grpo", lambda n, lengths: n * len(lengths)),
        ("gspo", lambda n, lengths: n * len(lengths)),
        ("bnpo", lambda n, lengths: sum(lengths)),
        ("reinforce_pp", lambda n, lengths: sum(lengths)),
        ("dr_grpo", lambda n, lengths: len(lengths) * MAX_LENGTH),
        ("dapo", lambda n, lengths: 30 / 2),
        ("cispo", lambda n, lengths: 30 / 2),
        ("rloo", lambda n, lengths: len(lengths)),
    ],
)
def test_on_policy_gradient_is_minus_advantage_over_the_normaliser(loss_type: str, normaliser: Any) -> None:
    """At ratio 1 all losses are the policy gradient; they differ in what divides it."""
    lengths = [3, 1, 4]
    batch = dataclasses.replace(random_batch(lengths, [True] * 3), old_logp_T=None)
    totals = LossTotals.of_step(lengths, [True] * 3, rollout_tokens=30, steps_per_generation=2)
    _, grad, metrics = loss_and_grad(batch, totals, settings_of(loss_type))
    per_token = torch.tensor([1.0 / normaliser(n, lengths) for n in lengths], dtype=torch.float64)
    if loss_type == "gspo":  # the sequence ratio's own mean over tokens, and the loss's, are the same 1/n
        assert grad.sum() == pytest.approx(float(-(batch.advantage_N / 3).sum()))
    wanted = -(batch.advantage_N * per_token)[batch.row_T]
    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-15)
    values = metrics.values()
    assert values["ratio/min"] == values["ratio/mean"] == values["ratio/max"] == 1.0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_G20_on_policy_ratio_is_exactly_one_and_nothing_is_clipped(loss_type: str) -> None:
    """G20: without old log-probs the training pass's own are taken, in fp32 and bf16-rounded too: ratio 1, KL 0."""
    batch = random_batch([3, 2], [True, True])
    logp = batch.logp_T.bfloat16().float()
    floats = {"advantage_N": batch.advantage_N.float(), "entropy_T": None}
    given = dataclasses.replace(batch, logp_T=logp, old_logp_T=logp.clone(), ref_logp_T=logp.clone(), **floats)
    absent = dataclasses.replace(given, old_logp_T=None)
    totals = LossTotals.of_step([3, 2], [True, True])
    how = settings_of(loss_type, beta=0.1)
    first, second = loss_and_grad(given, totals, how), loss_and_grad(absent, totals, how)
    assert first[0] == second[0] and torch.equal(first[1], second[1])
    values = second[2].values()
    assert values["ratio/min"] == values["ratio/max"] == 1.0 and values["kl"] == 0.0
    clipped = [v for k, v in values.items() if k.startswith("clip_ratio")]
    assert clipped == [0.0] * (0 if loss_type == "cispo" else 5)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_left_out_responses_have_no_effect_but_on_row_counts(loss_type: str) -> None:
    lengths, counts = [2, 3, 1], [True, False, True]
    batch = random_batch(lengths, counts)
    totals = LossTotals.of_step(lengths, counts)
    assert totals == LossTotals(num_rows=3, num_tokens=3, mean_step_tokens=3.0)
    loss, grad, metrics = loss_and_grad(batch, totals, settings_of(loss_type, beta=0.1))
    assert not grad[batch.row_T == 1].any() and grad[batch.row_T != 1].any()
    # Even absurd values there change nothing, where 0 * inf would be NaN.
    assert batch.old_logp_T is not None and batch.ref_logp_T is not None
    wild = dataclasses.replace(
        batch,
        old_logp_T=torch.where(batch.row_T == 1, -2000.0, batch.old_logp_T),
        ref_logp_T=torch.where(batch.row_T == 1, 2000.0, batch.ref_logp_T),
        advantage_N=torch.tensor([batch.advantage_N[0], 1e9, batch.advantage_N[2]], dtype=torch.float64),
    )
    wild_loss, wild_grad, wild_metrics = loss_and_grad(wild, totals, settings_of(loss_type, beta=0.1))
    assert wild_loss == loss and torch.equal(wild_grad, grad) and wild_metrics.values() == metrics.values()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_all_responses_left_out_is_zero_and_finite(loss_type: str) -> None:
    batch = random_batch([2, 1], [False, False])
    totals = LossTotals.of_step([2, 1], [False, False])
    loss, grad, metrics = loss_and_grad(batch, totals, settings_of(loss_type, beta=0.1))
    assert loss == 0.0 and not grad.any()
    assert metrics.values() == {"loss": 0.0, "policy_loss": 0.0}


def test_zero_advantage_gives_zero_gradient() -> None:
    batch = dataclasses.replace(random_batch([2, 3], [True, True]), advantage_N=torch.zeros(2, dtype=torch.float64))
    for loss_type in LOSSES:
        assert not loss_and_grad(batch, LossTotals.of_step([2, 3], [True, True]), settings_of(loss_type))[1].any()


def test_kl_term_is_beta_times_the_same_reduction_and_logged_without_beta_in_loss() -> None:
    lengths = [2, 3]
    batch = random_batch(lengths, [True, True])
    totals = LossTotals.of_step(lengths, [True, True])
    for loss_type in LOSSES:
        alone = {"beta": 0.5, "kl_estimator": "k1", "use_bias_correction_kl": False}
        with_kl = loss_and_grad(batch, totals, settings_of(loss_type, **alone))
        in_reward = loss_and_grad(batch, totals, settings_of(loss_type, beta=0.5, kl_estimator="k1", kl_in_reward=True))
        without = loss_and_grad(batch, totals, settings_of(loss_type))
        assert in_reward[0] == without[0] and torch.equal(in_reward[1], without[1])
        values = with_kl[2].values()
        assert batch.ref_logp_T is not None
        assert values["kl"] == pytest.approx(float((batch.logp_T - batch.ref_logp_T).mean()))
        assert in_reward[2].values()["kl"] == values["kl"] and values["policy_loss"] == without[0]
        # d(k1)/d(logp) = 1: the KL's gradient is beta times each token's scale
        scale = {"grpo": [1 / 4] * 2 + [1 / 6] * 3, "gspo": [1 / 4] * 2 + [1 / 6] * 3, "rloo": [1 / 2] * 5,
                 "dr_grpo": [1 / 18] * 5}.get(loss_type, [1 / 5] * 5)  # fmt: skip
        torch.testing.assert_close(with_kl[1] - without[1], 0.5 * torch.tensor(scale, dtype=torch.float64))


def test_rloo_ratio_is_the_whole_response_and_gspo_its_geometric_mean() -> None:
    batch = random_batch([4], [True])
    totals = LossTotals.of_step([4], [True])
    assert batch.old_logp_T is not None
    log_ratio = float((batch.logp_T - batch.old_logp_T).sum())
    for loss_type, wanted in (("rloo", math.exp(log_ratio)), ("gspo", math.exp(log_ratio / 4))):
        values = loss_and_grad(batch, totals, settings_of(loss_type))[2].values()
        assert values["ratio/mean"] == pytest.approx(wanted, rel=1e-12)


def test_the_kl_of_rloo_is_weighed_token_by_token_whatever_the_ratio_of_the_response() -> None:
    batch, totals = random_batch([3], [True]), LossTotals.of_step([3], [True])
    assert batch.old_logp_T is not None and batch.ref_logp_T is not None
    with_kl, without = (loss_and_grad(batch, totals, settings_of("rloo", beta=beta)) for beta in (0.5, 0.0))
    logp = batch.logp_T.clone().requires_grad_()
    d = batch.ref_logp_T - logp
    (0.5 * ((logp - batch.old_logp_T).exp() * (d.exp() - 1 - d)).sum()).backward()  # one response: scale 1
    assert logp.grad is not None
    torch.testing.assert_close(with_kl[1] - without[1], logp.grad, rtol=1e-12, atol=1e-14)


def test_delta_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    batch = LossBatch(
        torch.tensor([0.0]), torch.tensor([-5.0]), None, torch.tensor([-1.0]), torch.tensor([0]), torch.tensor([True])
    )
    totals = LossTotals.of_step([1], [True])
    assert loss_and_grad(batch, totals, settings_of("grpo"))[0] == pytest.approx(math.exp(5.0))
    loss, grad, _ = loss_and_grad(batch, totals, settings_of("grpo", delta=3.0))
    assert loss == pytest.approx(3.0) and not grad.any()


def test_weights_multiply_the_policy_term_only() -> None:
    batch = random_batch([2, 2], [True, True], weights=True)
    totals, how = LossTotals.of_step([2, 2], [True, True]), settings_of("dapo", beta=0.1)
    assert batch.weight_T is not None
    weighted = loss_and_grad(batch, totals, how)[2].values()
    plain = loss_and_grad(dataclasses.replace(batch, weight_T=None), totals, how)[2].values()
    doubled = dataclasses.replace(batch, weight_T=2 * batch.weight_T)
    assert loss_and_grad(doubled, totals, how)[2].values()["policy_loss"] == pytest.approx(2 * weighted["policy_loss"])
    assert weighted["loss"] - weighted["policy_loss"] == pytest.approx(plain["loss"] - plain["policy_loss"])


def test_combinations_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cispo needs algorithm\.epsilon_high.*0\.2"):
        LossSettings.from_config(AlgorithmConfig(loss_type="cispo"), 8)
    with pytest.raises(ConfigError, match="delta has no effect"):
        LossSettings.from_config(AlgorithmConfig(loss_type="cispo", epsilon_high=5.0, delta=2.0), 8)
    batch = dataclasses.replace(random_batch([1], [True]), ref_logp_T=None)
    with pytest.raises(ValueError, match="ref_logp_T"):
        policy_loss(batch, LossTotals.of_step([1], [True]), settings_of("grpo", beta=0.1))


def test_shapes_that_would_broadcast_silently_are_refused() -> None:
    batch = random_batch([2, 1], [True, True])
    with pytest.raises(ValueError, match=r"old_logp_T has shape \(1,\), needed that of logp_T, \(3,\)"):
        dataclasses.replace(batch, old_logp_T=torch.zeros(1))
    with pytest.raises(ValueError, match=r"counts_N \(1,\)"):
        dataclasses.replace(batch, counts_N=torch.ones(1, dtype=torch.bool))
