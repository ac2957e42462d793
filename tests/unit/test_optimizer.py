"""The optimizer refuses what would ruin the weights, and lets go of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollplex.config import TrainConfig
from rollplex.errors import CheckpointError, TrainingError
from rollplex.train.optimizer import PolicyOptimizer

CONFIG = TrainConfig(learning_rate=0.1)


def _model(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(dtype)


def _pass(model: nn.Linear, scale: float = 1.0) -> None:
    (model(torch.ones(1, 3, dtype=model.weight.dtype)).sum() * scale).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, scale):
    model = _model(dtype)
    optimizer = PolicyOptimizer(model, CONFIG, 10)
    _pass(model)
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in (model.state_dict() | optimizer.named_state()).items()}
    _pass(model, scale)
    with pytest.raises(TrainingError, match=r"optimizer step 2 is (nan|inf).*learning_rate"):
        optimizer.step()
    after = model.state_dict() | optimizer.named_state()
    assert [name for name in before if not before[name].equal(after[name])] == []
    assert optimizer.num_steps == 1
    _pass(model)
    assert optimizer.step().grad_norm > 0  # nothing of the bad gradient is left


def test_a_second_optimizer_of_16_bit_weights_gets_the_gradients_once_the_first_is_closed():
    model = _model(torch.bfloat16)
    first = PolicyOptimizer(model, CONFIG, 10)
    _pass(model)
    first.close()
    assert all(master.grad is None for master in first.masters.values())
    second = PolicyOptimizer(model, CONFIG, 10)
    _pass(model)
    assert all(master.grad is None for master in first.masters.values())
    assert all(master.grad is not None for master in second.masters.values())


def _state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = _model(dtype)
    optimizer = PolicyOptimizer(model, CONFIG, 10)
    _pass(model)
    optimizer.step()
    return {name: tensor.clone() for name, tensor in optimizer.named_state().items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("master/bias"), "lacks the fp32 master of bias"),
        (lambda state: state.update({"exp_avg/bias": torch.zeros(5)}), r"exp_avg/bias has shape \(5,\), needed \(2,\)"),
        (lambda state: state.update({"exp_avg/other": torch.zeros(2)}), r"not in the model \['other'\]"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_of_it_loaded(change, message):
    state = _state(torch.bfloat16)
    change(state)
    optimizer = PolicyOptimizer(_model(torch.bfloat16), CONFIG, 10)
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_named_state(state, 1)
    assert all(before[name].equal(master) for name, master in optimizer.masters.items())
    assert optimizer.adamw.state == {}
    assert optimizer.num_steps == 0
