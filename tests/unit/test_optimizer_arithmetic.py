"""PolicyOptimizer's numbers: AdamW and clipping against the written-out formulas, fp32 masters, the schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from numerics.oracle import AdamState, Settings, clip_and_adamw
from rollplex.config import TrainConfig
from rollplex.train.optimizer import PolicyOptimizer, learning_rate_at

NUMBERS = {"learning_rate": 0.05, "weight_decay": 0.1, "max_grad_norm": 0.7, "adam_epsilon": 1e-6}


def _model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).to(dtype)


def _backward(model, step, parts=1):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, generator=draw, dtype=torch.float64).to(model[0].weight.dtype)
    target = torch.randn(8, 4, generator=draw, dtype=torch.float64).to(x.dtype)
    for part in range(parts):
        rows = slice(part * 8 // parts, (part + 1) * 8 // parts)
        ((model(x[rows]) - target[rows]) ** 2).sum().backward()


def test_adamw_and_clipping_equal_the_formulas():
    """Decay on matrices only, not on biases and norms; the norm before clipping is reported."""
    model, judge = _model(torch.float64), _model(torch.float64)
    optimizer = PolicyOptimizer(model, TrainConfig(**NUMBERS), 5)
    settings, state = Settings(**NUMBERS), AdamState()
    for step in range(5):
        _backward(model, step)
        _backward(judge, step)
        norm = clip_and_adamw(judge, {n: p.grad for n, p in judge.named_parameters()}, state, settings)
        judge.zero_grad()
        assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-12)
        assert norm > NUMBERS["max_grad_norm"]
        for found, wanted in zip(model.parameters(), judge.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_16_bit_weights_are_the_rounded_masters():
    """Steps smaller than a bfloat16 step add up in the masters until the weight moves."""
    model = _model(torch.bfloat16)
    start = model[0].weight.detach().clone()
    optimizer = PolicyOptimizer(model, TrainConfig(learning_rate=1e-5), 400)
    moved = 0
    for step in range(400):
        _backward(model, 0)
        optimizer.step()
        for name, weight in model.named_parameters():
            assert torch.equal(weight, optimizer.masters[name].bfloat16())
        moved += step == 0 and not torch.equal(model[0].weight, start)
    assert not moved  # one step alone is lost in rounding
    assert float((optimizer.masters["0.weight"] - start.float()).abs().min()) > 1e-3
    assert not torch.equal(model[0].weight, start)


def test_16_bit_gradients_accumulate_in_float32():
    whole, parts = _model(torch.bfloat16), _model(torch.bfloat16)
    optimizers = [PolicyOptimizer(m, TrainConfig(), 1) for m in (whole, parts)]
    _backward(whole, 0)
    _backward(parts, 0, parts=8)
    for name, master in optimizers[1].masters.items():
        assert master.grad.dtype == torch.float32
        torch.testing.assert_close(master.grad, optimizers[0].masters[name].grad, rtol=0.05, atol=0.1)
    exact = sum(_one_gradient(part) for part in range(8))
    assert torch.equal(optimizers[1].masters["0.weight"].grad, exact)


def _one_gradient(part):
    """Gradient of one eighth, widened: the sum of eight of these is what fp32 accumulation must give."""
    model = _model(torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=draw, dtype=torch.float64).bfloat16()[part : part + 1]
    target = torch.randn(8, 4, generator=draw, dtype=torch.float64).bfloat16()[part : part + 1]
    ((model(x) - target) ** 2).sum().backward()
    return model[0].weight.grad.float()


def test_a_weight_without_gradient_stays_and_one_with_zeros_moves_on():
    model = _model(torch.float64)
    optimizer = PolicyOptimizer(model, TrainConfig(**NUMBERS), 3)
    _backward(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.fill_gradients([model[0].weight])
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [True, False, False, False]


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
    ],
)
def test_schedules(kind, rates):
    """Two steps of warm-up, then from the peak towards 0 at step 6; never below 0 after it."""
    config = TrainConfig(learning_rate=1.0, warmup_steps=2, lr_scheduler_type=kind)
    assert [learning_rate_at(step, 6, config) for step in range(6)] == pytest.approx(rates)
    assert learning_rate_at(9, 6, config) == pytest.approx(1.0 if kind == "constant" else 0.0)
