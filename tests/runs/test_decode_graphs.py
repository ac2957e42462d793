"""A run whose decode steps have fixed shapes learns what any other does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollplex.config import Config
from rollplex.runtime.trainer import Trainer

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "one after another": {"schedule": {"name": "serial", "overlap": "off"}},
    "beside passes, few rows": {
        "schedule": {"name": "rollplex", "overlap": "on", "unit_tokens": 64, "decode_threads": 1},
        "rollout": {"max_decode_rows": 6},
    },
    "lora, several optimizer steps": {
        "model": {"build": {"family": "qwen3_vl"}, "lora": {"r": 4}},
        "algorithm": {"steps_per_generation": 2, "num_iterations": 2},
    },
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def _trained(folder: Path, sections: dict[str, dict[str, Any]], choice: str) -> tuple[dict[str, Any], list[float]]:
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(folder), "num_threads": 2, "log_completions_steps": 0},
        "model": {"build": {}},
        "data": {"task": "mixed", "image_size": 56},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12, "decode_graphs": choice},
        "algorithm": {"beta": 0.04},
        "rewards": {"reward_funcs": [f"{__file__}:reward"]},
        "train": {"max_steps": 3, "learning_rate": 1e-3},
    }
    for name, options in sections.items():
        tree[name] = {**tree.get(name, {}), **options}
    tree["model"]["dtype"] = "float64"  # no draw is near enough to an edge for the last bits of a logit to decide it
    trainer = Trainer(Config.model_validate(json.loads(json.dumps(tree))))
    try:
        rewards = [trainer.run_step()[0].metrics["reward"] for _ in range(3)]
        model = trainer.session.loaded.model
        return {name: p.detach().clone() for name, p in model.named_parameters()}, rewards
    finally:
        trainer.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_a_run_without(variant: str, tmp_path: Path) -> None:
    """Bit by bit: the update reads the sampled tokens, and the engine's log-probs only to report how far they are."""
    wanted, lean = _trained(tmp_path / "off", VARIANTS[variant], "off")
    found, fixed = _trained(tmp_path / "on", VARIANTS[variant], "on")
    assert lean == fixed
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])] == []
