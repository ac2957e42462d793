"""Every algorithm and training option in a real run of two steps: it trains, moves weights, reports finite numbers."""

from __future__ import annotations

import json
import math

import pytest

from rollplex.config import Config
from rollplex.runtime.trainer import Trainer

CASES = {
    "grpo": {"algorithm": {"loss_type": "grpo"}},
    "bnpo": {"algorithm": {"loss_type": "bnpo"}},
    "dr_grpo": {"algorithm": {"loss_type": "dr_grpo", "scale_rewards": "none"}},
    "cispo": {"algorithm": {"loss_type": "cispo", "epsilon_high": 5.0}},
    "gspo": {"algorithm": {"loss_type": "gspo", "num_iterations": 2}},
    "rloo": {"algorithm": {"loss_type": "rloo"}},
    "reinforce_pp": {"algorithm": {"loss_type": "reinforce_pp", "beta": 0.02, "kl_in_reward": True}},
    "kl k1 in reward": {"algorithm": {"beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}},
    "kl k2 in loss": {"algorithm": {"beta": 0.1, "kl_estimator": "k2"}},
    "kl k3 in loss, two-sided clip": {"algorithm": {"beta": 0.1, "delta": 2.0, "epsilon_high": 0.28}},
    "batch scale, sequence level": {"algorithm": {"scale_rewards": "batch", "importance_sampling_level": "sequence"}},
    "token truncation": {"algorithm": {"mismatch_correction": "token_truncate"}},
    "sequence mask": {"algorithm": {"mismatch_correction": "sequence_mask", "mismatch_clip_max": 2.0}},
    "masked truncated": {"algorithm": {"mask_truncated_completions": True}},
    "several steps and epochs": {"algorithm": {"steps_per_generation": 2, "num_iterations": 2}},
    "checkpointed prefix": {"train": {"prefix_activations": "checkpoint"}},
    "recomputed prefix": {"train": {"prefix_activations": "recompute"}},
    "full sequence": {"train": {"share_prefix": False}, "algorithm": {"beta": 0.1, "steps_per_generation": 2}},
    "small budget": {"train": {"micro_batch_tokens": 16}},
    "bfloat16": {"model": {"dtype": "bfloat16"}, "algorithm": {"beta": 0.1}},
    "bfloat16 after a warm start": {"model": {"dtype": "bfloat16"}, "warm_start": {"steps": 2, "batch_size": 4}},
    "bfloat16, full sequence": {"model": {"dtype": "bfloat16"}, "train": {"share_prefix": False}},
    "float64": {"model": {"dtype": "float64"}},
    "lora": {"model": {"lora": {"r": 4}}, "algorithm": {"beta": 0.1}},
    "lora, bfloat16, checkpointed": {
        "model": {"lora": {"r": 4}, "dtype": "bfloat16"},
        "train": {"prefix_activations": "checkpoint"},
    },
    "lora after a warm start": {
        "model": {"lora": {"r": 4}},
        "warm_start": {"steps": 2, "batch_size": 4},
        "algorithm": {"beta": 0.1},
    },
    "frozen vision, recomputed": {"model": {"freeze_vision": True}, "train": {"prefix_activations": "recompute"}},
    "filters": {"rollout": {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "temperature": 0.7}},
    "few rows at once": {"rollout": {"max_decode_rows": 3}},
    "schedules": {"train": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1}},
}


def varied_reward(completion_ids, **_):
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def _config(output_dir, family, case):
    tree = {
        "run": {"output_dir": str(output_dir), "num_threads": 1, "log_completions_steps": 0},
        "model": {"build": {"family": family}},
        "data": {"task": "mixed", "image_size": 56, "num_rows": 8},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6},
        "rewards": {"reward_funcs": [f"{__file__}:varied_reward"]},
        "train": {"max_steps": 2, "learning_rate": 1e-3},
    }
    for name, section in case.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(json.loads(json.dumps(tree)))


@pytest.mark.parametrize("name", CASES)
def test_option_trains(name, tmp_path):
    family = ("qwen2_5_vl", "qwen3_vl")[list(CASES).index(name) % 2]
    trainer = Trainer(_config(tmp_path / "run", family, CASES[name]))
    try:
        model = trainer.session.loaded.model
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for _ in range(2):
            report, _ = trainer.run_step()
        after = dict(model.named_parameters())
    finally:
        trainer.close()
    wrong = {key: value for key, value in report.metrics.items() if not math.isfinite(value)}
    assert wrong == {}
    assert report.metrics["grad_norm"] > 0
    moved = {n for n in before if not before[n].equal(after[n])}
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert moved <= trainable
    assert len(moved) > 0.8 * len(trainable)
