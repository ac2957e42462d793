"""Filters against transformers' LogitsProcessors; draws against their distribution; keyed uniforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollplex.rollout.sampling import Filters, draw, filtered, keyed_uniforms, penalised

FILTERS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 3, 100]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.05]),
        "min_p": st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    }
)


@settings(max_examples=120, derandomize=True)
@given(
    seed=st.integers(0, 999),
    vocab=st.integers(1, 40),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    ties=st.booleans(),
    filters=FILTERS,
)
def test_filters_equal_transformers(seed, vocab, scale, ties, filters):
    """In its order: top-k, top-p, min-p. At least one token always stays."""
    scores = scale * torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if ties:
        scores = scores.round()
    if vocab > 3:
        scores[:, 1] = float("-inf")  # a banned id
    wanted = scores.clone()
    if filters["top_k"]:
        wanted = TopKLogitsWarper(filters["top_k"])(None, wanted)
    if filters["top_p"] < 1:
        wanted = TopPLogitsWarper(filters["top_p"])(None, wanted)
    if filters["min_p"] > 0:
        wanted = MinPLogitsWarper(filters["min_p"])(None, wanted)
    found = filtered(scores, Filters(1.0, **filters, repetition_penalty=1.0, banned_ids=None))
    assert torch.equal(found, wanted)
    assert bool(torch.isfinite(found).any(-1).all())


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 999), penalty=st.sampled_from([0.5, 1.0, 1.3, 4.0]))
def test_repetition_penalty_equals_transformers(seed, penalty):
    draw_from = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 20, generator=draw_from)
    ids = torch.randint(20, (3, 7), generator=draw_from)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    seen = torch.zeros(3, 20, dtype=torch.bool).scatter_(1, ids, True)
    torch.testing.assert_close(penalised(logits, seen, penalty), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_follow_the_distribution(dtype):
    """Chi-square over 40,000 keyed draws; tokens of probability 0 never come."""
    scores = torch.tensor([0.3, -1.2, float("-inf"), 2.0, -4.0, 0.0, 1.1, float("-inf")], dtype=dtype)
    uniforms = torch.from_numpy(np.concatenate([keyed_uniforms(3, rollout, 0, 200) for rollout in range(200)]))
    counts = torch.bincount(draw(scores.expand(len(uniforms), -1), uniforms), minlength=8)
    assert counts[2] == counts[7] == 0
    kept = torch.isfinite(scores)
    expected = scores.double().softmax(-1)[kept] * len(uniforms)
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_the_ends_of_the_unit_interval():
    """0 gives the first possible token, the largest number below 1 the last one, never an id without probability."""
    scores = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    below_one = torch.tensor([np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw(scores, torch.zeros(1, dtype=torch.float64)).tolist() == [1]
    assert draw(scores, below_one).tolist() == [2]
    many = torch.full((1, 100_000), -3.0)
    many[0, 70_000:] = float("-inf")
    assert draw(many, below_one).tolist() == [69_999]


def test_a_draw_is_the_inverse_of_the_cdf():
    scores = torch.log(torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64))
    for uniform, token in ((0.1, 0), (0.3, 1), (0.7, 1), (0.8, 2)):
        assert draw(scores, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_uniforms_depend_on_their_key_alone():
    base = keyed_uniforms(1, 2, 3, 50)
    assert np.array_equal(base, keyed_uniforms(1, 2, 3, 50))
    assert np.array_equal(base[:20], keyed_uniforms(1, 2, 3, 20))  # a longer limit changes no earlier number
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)):
        assert not np.intersect1d(base, keyed_uniforms(*other, 50)).size


def test_uniforms_are_uniform_within_and_across_keys():
    within = keyed_uniforms(0, 0, 0, 5000)
    across = np.array([keyed_uniforms(0, rollout, index, 1)[0] for rollout in range(300) for index in range(8)])
    for values in (within, across):
        assert 0 <= values.min() and values.max() < 1
        assert kstest(values, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(across[:-1], across[1:])[0, 1]) < 0.06
