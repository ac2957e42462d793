"""KL estimators: values, gradients, and their expectation under the policy."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex.train.kl import KlEstimator, response_kl, token_kl, unbiased

logps = st.floats(-20.0, 0.0)


@given(logps, logps)
def test_definitions_signs_and_zero(logp: float, ref: float) -> None:
    p, q = torch.tensor([logp], dtype=torch.float64), torch.tensor([ref], dtype=torch.float64)
    d = logp - ref
    assert token_kl(p, q, "k1").item() == d
    assert token_kl(p, q, "k2").item() == pytest.approx(d * d / 2, abs=1e-15)
    assert token_kl(p, q, "k3").item() == pytest.approx(float(torch.exp(q - p) - (q - p) - 1), rel=1e-9, abs=1e-12)
    assert token_kl(p, q, "k2").item() >= 0 and token_kl(p, q, "k3").item() >= 0
    for estimator in get_args(KlEstimator):
        assert token_kl(p, p, estimator).item() == 0


def test_expectations_under_the_policy_are_those_of_the_kl() -> None:
    """k1 and k3 have the KL as their mean; k2's gradient weighted by the policy is the KL's gradient."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    policy = scores.log_softmax(0)
    reference = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    probs = policy.detach().exp()
    for estimator in ("k1", "k3"):
        assert (probs * token_kl(policy, reference, estimator)).sum().item() == pytest.approx(exact.item(), rel=1e-12)
    (wanted,) = torch.autograd.grad(exact, scores, retain_graph=True)
    (of_k2,) = torch.autograd.grad((probs * token_kl(policy, reference, "k2")).sum(), scores, retain_graph=True)
    torch.testing.assert_close(of_k2, wanted, rtol=1e-10, atol=1e-12)
    # ... while k1 in the loss has no gradient on average: it is meant for the reward.
    (of_k1,) = torch.autograd.grad((probs * token_kl(policy, reference, "k1")).sum(), scores)
    assert of_k1.abs().max() < 1e-14 < wanted.abs().max()


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_weighed_by_the_ratio_every_estimator_has_the_gradient_of_the_kl(estimator: KlEstimator) -> None:
    """Whoever sampled: means under the old policy, by its probabilities."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    policy = scores.log_softmax(0)
    reference, other = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), scores, retain_graph=True)
    for old in (policy.detach(), other):
        weighed = unbiased(token_kl(policy, reference, estimator), (policy - old).exp(), estimator)
        (found,) = torch.autograd.grad((old.exp() * weighed).sum(), scores, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    p, q = torch.tensor([-1.0]), torch.tensor([-1.0 - 1e-3])
    assert token_kl(p, q, "k3").item() == pytest.approx(5e-7, rel=0.2)


def test_response_kl_sums_tokens() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -3.0], dtype=torch.float64)
    assert response_kl(logp.split([1, 2]), ref.split([1, 2]), "k1") == [0.5, -1.0]


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        token_kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
