"""`rollplex verify` on the packaged tiny recipes and on models whose update is broken on purpose."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import recipe_path
from rollplex.runtime import verify as verify_module
from rollplex.runtime.verify import BOUNDS, verify

RECIPES = ("tiny_qwen2_5_vl", "tiny_qwen3_vl")


def _config(recipe, *overrides):
    return load_config(recipe_path(recipe), ("run.num_threads=1", *overrides))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tiny_recipes_pass_in_every_dtype(recipe, dtype):
    report = verify(_config(recipe, f"dtype={dtype}", "beta=0.1"))
    grad_bound, logp_bound = BOUNDS[dtype]
    assert report.passed and report.dtype == dtype
    assert 0 < report.max_rel_grad_error <= grad_bound
    assert 0 < report.max_abs_logp_error <= logp_bound
    assert report.grad_norm > 1e-2
    assert set(report.grad_errors) == {"graph", "checkpoint", "recompute"}
    assert {row.visual_tokens > 0 for row in report.rows} == {True, False}
    assert all(1 in row.response_tokens for row in report.rows)
    assert set(report.rows[-1].response_tokens) == {1}
    json.dumps(dataclasses.asdict(report), allow_nan=False)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora={}",),
        ("freeze_vision=true",),
        ("loss_type=reinforce_pp", "num_generations=1"),
        ("loss_type=gspo", "temperature=0.7", "top_p=0.9", "repetition_penalty=1.2"),
        ("loss_type=rloo", "kl_in_reward=true", "beta=0.1", "mask_truncated_completions=true"),
        ("loss_type=cispo", "epsilon_high=5.0", "mismatch_correction=token_truncate"),
        ("num_iterations=3", "steps_per_generation=2", "micro_batch_tokens=50"),
        ("share_prefix=false", "prompts_per_step=10", "tie_word_embeddings=true"),
    ],
    ids=lambda o: o[0],
)
def test_recipes_of_all_kinds_pass_in_float64(overrides):
    report = verify(_config("tiny_qwen3_vl", "dtype=float64", "num_layers=2", *overrides))
    assert report.passed
    assert report.grad_norm > 1e-2


def test_the_engine_that_a_recipe_names_changes_nothing():
    """Sampling is always local here. vLLM's mismatch correction would give each path weights of its own rounding."""
    own = ("dtype=bfloat16", "max_completion_length=32")
    local, vllm = (verify(_config("tiny_qwen2_5_vl", *own, f"rollout.engine={name}")) for name in ("local", "vllm"))
    assert vllm == local and local.passed


def test_no_weight_moves():
    """Verification trains nothing: the session's weights are those of a fresh one afterwards."""
    kept = []
    original = verify_module.build_session

    def remember(config):
        kept.append(original(config))
        return kept[-1]

    verify_module.build_session = remember
    try:
        config = _config("tiny_qwen2_5_vl")
        verify(config)
    finally:
        verify_module.build_session = original
    fresh = original(config)
    for got, wanted in zip(kept[0].loaded.model.parameters(), fresh.loaded.model.parameters(), strict=True):
        assert torch.equal(got, wanted)
        assert got.grad is None


def test_a_wrong_position_does_not_pass(monkeypatch):
    """A split path that starts responses at the prompt length fails by orders of magnitude."""
    from rollplex.train import response

    layout = response._layout

    def shifted(pack, groups):
        fed, picks = layout(pack, groups)
        for number, group in enumerate(fed.groups):
            spec = pack.specs[group[0]]
            start = sum(sum(lengths) for _, lengths in fed.groups[:number])
            for place in range(start, start + sum(group[1])):
                fed.positions[place] += spec.num_tokens - spec.next_position
        return fed, picks

    monkeypatch.setattr(response, "_layout", shifted)
    report = verify(_config("tiny_qwen2_5_vl", "dtype=float64"))
    assert not report.passed
    assert report.max_rel_grad_error > 1e-4
    assert report.max_abs_logp_error > 1e-6


def test_nan_does_not_pass(monkeypatch):
    monkeypatch.setattr(verify_module, "REFERENCE_NOISE", float("nan"))
    assert not verify(_config("tiny_qwen2_5_vl", "beta=0.1")).passed
