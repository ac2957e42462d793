"""Chunked log-probs from hidden states against log_softmax with autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.models import logprobs
from rollplex.models.logprobs import token_logps


def _case(tokens, vocab, dtype=torch.float64, scale=1.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(tokens, 6, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 6, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,), generator=draw)


def _plain(hidden, weight, tokens, temperature):
    logps = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logps.gather(1, tokens[:, None]).squeeze(1), -(logps.exp() * logps).sum(-1)


@settings(max_examples=40, derandomize=True)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    elements=st.sampled_from([1, 25, 1 << 24]),
)
def test_values_and_gradients_for_any_chunking(tokens, vocab, temperature, elements):
    hidden, weight, chosen = _case(tokens, vocab)
    upstream = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "MAX_LOGIT_ELEMENTS", elements)
        found = token_logps(hidden, weight, chosen, temperature)
        found.logps.backward(upstream)
    grads = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    logps, entropies = _plain(hidden, weight, chosen, temperature)
    torch.testing.assert_close(found.logps, logps, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.entropies, entropies, rtol=0, atol=1e-12)
    logps.backward(upstream)
    for got, wanted in zip(grads, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_gradcheck():
    hidden, weight, chosen = _case(4, 5)
    assert torch.autograd.gradcheck(lambda h, w: token_logps(h, w, chosen, 0.7).logps, (hidden, weight))


def test_frozen_sides_get_no_gradient():
    for frozen in (0, 1):
        hidden, weight, chosen = _case(3, 5)
        (hidden, weight)[frozen].requires_grad_(False)
        token_logps(hidden, weight, chosen, 1.0).logps.sum().backward()
        assert (hidden, weight)[frozen].grad is None
        assert (hidden, weight)[1 - frozen].grad is not None


def test_statistics_of_16_bit_models_are_taken_in_float32():
    hidden, weight, chosen = _case(5, 8, torch.bfloat16)
    found = token_logps(hidden, weight, chosen, 1.0)
    assert found.logps.dtype == found.entropies.dtype == torch.float32
    logits = (hidden @ weight.t()).float()
    torch.testing.assert_close(found.logps, logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1))
    found.logps.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_certain_tokens_have_entropy_zero_not_nan():
    """Probabilities that underflow to 0 count 0, and a sure token has log-prob 0."""
    hidden, weight, chosen = _case(4, 6, torch.float32, scale=1e4)
    found = token_logps(hidden, weight, (hidden @ weight.t()).argmax(-1), 1.0)
    assert torch.equal(found.entropies, torch.zeros(4))
    assert torch.equal(found.logps, torch.zeros(4))
    token_logps(hidden, weight, chosen, 1.0).logps.sum().backward()
    assert bool(torch.isfinite(hidden.grad).all())
