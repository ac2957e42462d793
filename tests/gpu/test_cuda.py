"""The same code on a GPU: what a step gives there is what it gives on the CPU. Skipped, visibly, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollplex.config import Config, TrainConfig
from rollplex.memory.host_copies import HostCopies
from rollplex.runtime.device import allocated_bytes, device_of, reset_peak
from rollplex.runtime.trainer import Trainer
from rollplex.train.optimizer import PolicyOptimizer

pytestmark = pytest.mark.skipif(device_of("auto").type != "cuda", reason="needs a CUDA GPU")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def _trained(folder: Path, device: str, family: str, schedule: dict[str, Any]) -> dict[str, torch.Tensor]:
    tree = {
        "run": {"output_dir": str(folder), "device": device},
        "model": {"build": {"family": family}, "dtype": "float64"},
        "data": {"task": "mixed", "image_size": 56},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8},
        "algorithm": {"beta": 0.04},
        "rewards": {"reward_funcs": [f"{__file__}:reward"]},
        "train": {"max_steps": 2, "learning_rate": 1e-3},
        "schedule": {"unit_tokens": 64, **schedule},
    }
    trainer = Trainer(Config.model_validate(tree))
    try:
        for _ in range(2):
            trainer.run_step()
        return {name: p.detach().cpu() for name, p in trainer.session.loaded.model.named_parameters()}
    finally:
        trainer.close()


@pytest.mark.parametrize("schedule", ["serial", "rollplex", "stream"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_steps_on_the_gpu_equal_those_on_the_cpu(family: str, schedule: str, tmp_path: Path) -> None:
    wanted = _trained(tmp_path, "cpu", family, {"name": "serial", "overlap": "off"})
    found = _trained(tmp_path, "cuda", family, {"name": schedule, "overlap": "on"})
    for name, tensor in wanted.items():
        # fp64 on both, but for the casts to fp32 inside transformers' models
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_host_copies_free_device_memory_and_bring_it_back() -> None:
    device = device_of("cuda")
    weight = torch.randn(1 << 20, device=device)
    before, held = weight.cpu(), allocated_bytes(device)
    assert held is not None  # on a GPU it is counted
    copies = HostCopies("weight", [weight])
    for _ in range(3):
        copies.put_away()
        assert torch.equal(copies.on_host(weight), before)  # waits for the copy
        assert allocated_bytes(device) == held - weight.nbytes
        copies.bring_back()
        copies.wait()
        assert torch.equal(weight.cpu(), before)


def test_streamed_optimizer_state_never_has_more_than_two_chunks_on_the_device() -> None:
    device, size = device_of("cuda"), 1 << 22
    chunk = 2 * 4 * size  # the two moments of one parameter
    model = torch.nn.ParameterList([torch.randn(size, device=device) for _ in range(12)])
    optimizer = PolicyOptimizer(model, TrainConfig(max_steps=3), 3, host_chunk_bytes=chunk)
    for step in range(3):
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        torch.accelerator.synchronize()
        reset_peak(device)
        # Active, not allocated: what a copy still reads counts until the copy has ended.
        before = torch.accelerator.memory_stats(device)["active_bytes.all.current"]
        optimizer.step()
        torch.accelerator.synchronize()
        most = torch.accelerator.memory_stats(device)["active_bytes.all.peak"]
        if step:  # the first makes the state
            assert most - before <= 2 * chunk + (1 << 20)


def test_a_capped_run_gives_the_weights_of_an_uncapped_one(tmp_path: Path) -> None:
    found = []
    for cap in ({}, {"cap_gib": 0.5, "stream_chunk_mib": 1}):
        tree = {
            "run": {"output_dir": str(tmp_path), "device": "cuda", "memory_steps": [1, 2]},
            "model": {"build": {"family": "qwen3_vl"}, "dtype": "bfloat16"},
            "data": {"task": "counting", "image_size": 56, "max_prompt_tokens": 64},
            "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8},
            "algorithm": {"beta": 0.04},
            "rewards": {"reward_funcs": [f"{__file__}:reward"]},
            "train": {"max_steps": 2, "learning_rate": 1e-3},
            "memory": cap,
        }
        trainer = Trainer(Config.model_validate(tree))
        try:
            for _ in range(2):
                trainer.run_step()
            found.append({name: p.detach().cpu() for name, p in trainer.session.loaded.model.named_parameters()})
        finally:
            trainer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
