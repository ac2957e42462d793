"""Optimizer state in host memory changes no bit of what is learnt, however it is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rollplex.config import TrainConfig
from rollplex.train.optimizer import PolicyOptimizer

CONFIG = TrainConfig(max_steps=10, learning_rate=0.1, weight_decay=0.01)


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.LayerNorm(2)).to(dtype)


def _steps(model: nn.Module, optimizer: PolicyOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 3, generator=generator).to(next(model.parameters()).dtype)
        layers = model if step % 2 else model[:2]  # the norm has no gradient in every second step
        layers(inputs).square().sum().backward()
        optimizer.step()


def _bits(model: nn.Module, optimizer: PolicyOptimizer) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **optimizer.named_state()}


@settings(max_examples=25)
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 1000))
def test_bits_are_those_of_state_on_the_device(dtype: torch.dtype, chunk_bytes: int) -> None:
    found = []
    for chunk in (None, chunk_bytes):
        model = _model(dtype)
        optimizer = PolicyOptimizer(model, CONFIG, 10, host_chunk_bytes=chunk)
        _steps(model, optimizer, 0, 4)
        found.append(_bits(model, optimizer))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [(None, 100), (100, None), (100, 40)])
def test_a_checkpoint_goes_from_either_kind_to_the_other(dtype: torch.dtype, chunks: tuple[int | None, ...]) -> None:
    straight = _model(dtype)
    optimizer = PolicyOptimizer(straight, CONFIG, 10)
    _steps(straight, optimizer, 0, 5)

    first, second = _model(dtype), _model(dtype)
    before = PolicyOptimizer(first, CONFIG, 10, host_chunk_bytes=chunks[0])
    _steps(first, before, 0, 3)
    state = {name: value.clone() for name, value in before.named_state().items()}
    second.load_state_dict(first.state_dict())
    after = PolicyOptimizer(second, CONFIG, 10, host_chunk_bytes=chunks[1])
    after.load_named_state(state, 3)
    _steps(second, after, 3, 5)
    wanted, found = _bits(straight, optimizer), _bits(second, after)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def _there(optimizer: PolicyOptimizer) -> int:
    """Tensors of masters and moments that are on the device."""
    return sum(tensor.untyped_storage().nbytes() > 0 for tensor in optimizer.device_state() if tensor.ndim)


def test_a_checkpoint_is_loaded_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose whole state does not fit on the device can be resumed there."""
    model = _model(torch.bfloat16)
    before = PolicyOptimizer(model, CONFIG, 10)
    _steps(model, before, 0, 2)
    state = {name: value.clone() for name, value in before.named_state().items()}
    before.close()
    after = PolicyOptimizer(model, CONFIG, 10, host_chunk_bytes=1)
    held: list[int] = []
    load = after._load

    def look(master: torch.Tensor, kind: str, value: torch.Tensor) -> None:
        load(master, kind, value)
        held.append(_there(after))

    monkeypatch.setattr(after, "_load", look)
    after.load_named_state(state, 2)
    assert len(held) == len(state) and max(held) == 3  # master and two moments of one parameter
    assert _there(after) == 0
    assert all(torch.equal(value, state[name]) for name, value in after.named_state().items())


def test_only_two_chunks_are_on_the_device_and_none_between_steps() -> None:
    model = _model(torch.bfloat16)
    optimizer = PolicyOptimizer(model, CONFIG, 10, host_chunk_bytes=1)
    _steps(model, optimizer, 0, 2)
    host = optimizer.host_state
    assert host is not None and host.num_chunks == len(list(model.parameters()))
    assert _there(optimizer) == 0
    held: list[int] = []
    for weight, gradient in zip(optimizer.masters.values(), model.parameters(), strict=True):
        weight.grad = torch.ones(gradient.shape)

    def look(_moved: object) -> None:
        held.append(_there(optimizer))

    host.step(look)
    assert max(held) == 6 and held[-1] == 3  # master and two moments of each parameter
