"""The same code on a GPU: what a step gives there is what it gives on the CPU. Skipped, visibly, without a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from numerics.cases import FAMILIES, tiny_rig
from rollplex.config import Config, TrainConfig
from rollplex.errors import ConfigError
from rollplex.memory.host_copies import HostCopies
from rollplex.models.attention import causal_attention
from rollplex.models.prefix import compute_prefix
from rollplex.models.row_chunks import RowChunks
from rollplex.rollout.decode_graphs import DecodeGraphs
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.runtime.device import CudaLanes, allocated_bytes, device_of, reset_peak
from rollplex.runtime.trainer import Trainer
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.types import Response

pytestmark = pytest.mark.skipif(device_of("auto").type != "cuda", reason="needs a CUDA GPU")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def _trained(folder: Path, device: str, family: str, schedule: dict[str, Any], **train: Any) -> dict[str, torch.Tensor]:
    tree = {
        "run": {"output_dir": str(folder), "device": device},
        "model": {"build": {"family": family}, "dtype": "float64"},
        "data": {"task": "mixed", "image_size": 56},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8},
        "algorithm": {"beta": 0.04},
        "rewards": {"reward_funcs": [f"{__file__}:reward"]},
        "train": {"max_steps": 2, "learning_rate": 1e-3, **train},
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


@pytest.mark.parametrize("schedule", ["rollplex", "stream"])
def test_steps_with_a_window_on_few_multiprocessors_equal_those_on_the_cpu(schedule: str, tmp_path: Path) -> None:
    options = {"name": schedule, "overlap": "on", "window_sms": 16}
    wanted = _trained(tmp_path, "cpu", "qwen2_5_vl", {"name": "serial", "overlap": "off"})
    found = _trained(tmp_path, "cuda", "qwen2_5_vl", options, prefix_activations="recompute")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_as_many_multiprocessors_as_there_are_leave_decoding_none() -> None:
    with pytest.raises(ConfigError, match=r"schedule.window_sms is 100000, but this GPU has \d+ multiprocessors"):
        CudaLanes(torch.device("cuda"), window_sms=100_000)


def test_a_graph_that_crosses_lanes_is_refused(tmp_path: Path) -> None:
    """Its backward would run in the lane of its forward."""
    with pytest.raises(ConfigError, match=r"needs train.prefix_activations=recompute .*, found graph"):
        _trained(tmp_path, "cuda", "qwen2_5_vl", {"name": "stream", "overlap": "on", "window_sms": 16})


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_in_chunks_equal_those_of_whole_passes_on_the_cpu(family: str, tmp_path: Path) -> None:
    wanted = _trained(tmp_path, "cpu", family, {"name": "serial", "overlap": "off"})
    found = _trained(tmp_path, "cuda", family, {"name": "rollplex", "overlap": "on", "chunk_tokens": 32})
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_attention_in_chunks_equals_whole_attention(dtype: torch.dtype, bound: float) -> None:
    """By the kernels of each dtype (flash, memory-efficient, plain), with the gradients of q, k and v."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(700, 4, 64), (700, 2, 64), (700, 2, 64)]
    inputs = [torch.randn(s, generator=draw).to("cuda", dtype).requires_grad_() for s in shapes]
    upstream = torch.randn(700, 256, generator=draw).to("cuda", dtype)
    found = []
    for limit in (None, 96):
        out = causal_attention(*inputs, RowChunks.of([600, 50, 50], limit, inputs[0]), 0.125)
        found.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for whole, chunked in zip(*found, strict=True):
        assert float((whole - chunked).norm() / whole.norm()) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_gives_what_that_of_transformers_does(family: str, dtype: torch.dtype, bound: float) -> None:
    made = tiny_rig(family, dtype, num_layers=2, num_heads=4, num_kv_heads=2)
    made.policy.model.to("cuda")
    specs = made.specs(("image", "text", "video", "two_images"))
    with torch.no_grad():
        found, right = made.policy.encode(specs), made.policy.encode(specs, ordinary=True)
    assert found is not None and right is not None
    for mine, theirs in zip((found.embeds, *found.deepstack), (right.embeds, *right.deepstack), strict=True):
        assert float((mine - theirs).float().norm() / theirs.float().norm()) < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_sample_what_lean_ones_do(family: str) -> None:
    """Also after the weights have changed in place, from the same captures."""
    made = tiny_rig(family, num_layers=2, num_heads=4, num_kv_heads=2)
    made.policy.model.to("cuda")
    specs = made.specs(("image", "text", "video", "two_images"))
    params = SamplingParams(num_generations=3, max_tokens=80, stop_token_ids=tuple(range(0, made.plain_vocab, 60)))
    graphs = DecodeGraphs(made.policy)

    def sampled(held: DecodeGraphs | None) -> dict[tuple[int, int], Response]:
        engine, found = LocalEngine(made.policy, params, max_rows=8, graphs=held), {}
        for number, spec in enumerate(specs):
            engine.admit(number, spec)
        while engine.busy:
            for finished in engine.step():
                found[finished.rollout_id, finished.response.index] = finished.response
        return found

    for _ in range(2):
        before = dict(graphs.steps)
        wanted, found = sampled(None), sampled(graphs)
        assert before.items() <= graphs.steps.items() and graphs.steps
        assert {key: r.token_ids for key, r in found.items()} == {key: r.token_ids for key, r in wanted.items()}
        for key, response in wanted.items():
            assert found[key].logps == pytest.approx(response.logps, abs=1e-9)
        with torch.no_grad():
            for parameter in made.policy.model.parameters():
                parameter.mul_(1.02)
        made.policy.bump()


def test_a_step_is_captured_while_a_pass_runs_in_the_window() -> None:
    """In another thread, on the window's stream, allocating as it goes; replays are on the decode lane's."""
    made = tiny_rig("qwen3_vl", torch.float32)
    made.policy.model.to("cuda")
    specs, lanes = made.specs(("image", "text", "video")), CudaLanes(made.policy.device)
    params = SamplingParams(num_generations=4, max_tokens=70)
    ended = threading.Event()
    passes: list[torch.Tensor] = []

    def window() -> None:
        while not ended.is_set():
            with lanes.window():
                passes.append(compute_prefix(made.policy, specs, "graph").hidden_GC.clone())

    def tokens(graphs: DecodeGraphs | None) -> dict[tuple[int, int], tuple[int, ...]]:
        found = {}
        with lanes.main():
            engine = LocalEngine(made.policy, params, max_rows=12, graphs=graphs)
            for number, spec in enumerate(specs):
                engine.admit(number, spec)
        while engine.busy:
            with lanes.decode(beside_window=True):
                done = engine.step()
            for finished in done:
                found[finished.rollout_id, finished.response.index] = finished.response.token_ids
        return found

    alone = tokens(DecodeGraphs(made.policy))
    thread = threading.Thread(target=window)
    thread.start()
    try:
        graphs = DecodeGraphs(made.policy)
        beside = tokens(graphs)
    finally:
        ended.set()
        thread.join()
    assert beside == alone and len(graphs.steps) > 1
    assert passes and all(torch.equal(found, passes[0]) for found in passes)


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
