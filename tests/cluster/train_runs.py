"""What each process does in test_train_runs.py: the trainer's own run, as `rollplex train` makes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from rollplex.config import Config
from rollplex.errors import ConfigError, RollplexError
from rollplex.parallel.groups import Job
from rollplex.parallel.team import ALONE
from rollplex.runtime.joining import team_of
from rollplex.runtime.trainer import Trainer

STEPS = 3
TIMED = ("timing_s/", "step_time", "overlap/")


def run_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """A tiny run in float64 whose rewards differ between responses, so that every step moves the weights."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(folder), "num_threads": 1, "seed": 5, "log_completions_steps": 2, "save_steps": 2},
        "model": {"build": {"family": "qwen2_5_vl", "num_heads": 4, "num_kv_heads": 2}, "dtype": "float64"},
        "data": {"task": "mixed", "image_size": 56, "media_workers": 1},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6},
        "rewards": {"reward_funcs": [f"{__file__}:token_reward"]},
        "train": {"max_steps": STEPS, "learning_rate": 1e-3, "micro_batch_tokens": 200},
        "schedule": {"unit_tokens": 64, "overlap": "off"},
        "parallel": {"deadline_s": 120.0},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return Config.model_validate(tree)


def token_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between responses."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def run_on(job: Job, config: Config) -> dict[str, Any]:
    """One process' part in the run; what it may be asked for."""
    trainer = Trainer(config, None, team_of(job, config))
    result = trainer.train()
    return {"rewards": result.rewards, "steps": result.steps, "evaluation": dict(result.evaluation)}


def refused_on(job: Job, configs: list[Config]) -> str:
    """What rank `job.rank` says to options of its own; "" where it finds nothing wrong."""
    try:
        Trainer(configs[job.rank], None, team_of(job, configs[job.rank])).close()
    except ConfigError as error:
        return str(error)
    return ""


def ended_by(job: Job, config: Config) -> str:
    """What one process says to its end before its time."""
    try:
        with job.telling():
            Trainer(config, None, team_of(job, config)).train()
    except RollplexError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_alone(config: Config) -> None:
    """The same run in this process."""
    Trainer(config, None, ALONE).train()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMED)} for line in lines]


def tensors_of(folder: Path, step: int = STEPS) -> dict[str, Any]:
    """Weights and optimizer state of a checkpoint."""
    return {
        f"{stem}/{key}": tensor
        for stem in ("model", "optimizer")
        for key, tensor in load_file(folder / f"checkpoint-{step}" / f"{stem}.safetensors").items()
    }


def rare_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal for all responses of many groups."""
    return [float(ids[0] % 5 == 0) for ids in completion_ids]


def broken_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Raises in the first process of a job."""
    return [1 / dist.get_rank() for _ in completion_ids]
