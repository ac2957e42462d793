"""Rollplex's arm: the trainer's own step, driven block by block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollplex.config import Config
from rollplex.runtime.trainer import Trainer
from vs_trl_arms.channel import Channel, StepClock
from vs_trl_arms.settings import ArmSpec


def config_of(spec: ArmSpec) -> Config:
    """Rollplex's configuration of the spec: the shared settings, our own choices elsewhere."""
    return Config.model_validate(
        {
            "run": {"output_dir": "run", "seed": spec.seed, "num_threads": spec.threads, "log_completions_steps": 0},
            "model": {"path": spec.model},
            "data": {"task": "files", "path": spec.rows, "shuffle": spec.shuffle},
            "rewards": {"reward_funcs": [spec.reward]},
            "rollout": {
                "prompts_per_step": spec.prompts,
                "num_generations": spec.responses,
                "max_completion_length": spec.tokens,
                "temperature": 1.0,
            },
            "algorithm": {"loss_type": spec.loss_type, "beta": 0.0},
            "train": {
                "learning_rate": spec.learning_rate,
                "lr_scheduler_type": "constant",
                "weight_decay": 0.0,
                "max_grad_norm": 1.0,
                "max_steps": spec.max_steps,
            },
        }
    )


def sample(lap: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """The report of one step."""
    return {
        **lap,
        "mean_length": metrics["completions/mean_length"],
        "min_length": metrics["completions/min_length"],
        "max_length": metrics["completions/max_length"],
        "reward": metrics["reward"],
        **{key: value for key, value in metrics.items() if key.startswith("timing_s/")},
    }


def main() -> None:
    """Load, report, and run blocks until the parent closes the pipe."""
    channel = Channel()
    trainer = Trainer(config_of(channel.spec))
    channel.ready(("rollplex", "torch", "transformers", "datasets"), {"threads": torch.get_num_threads()})
    try:
        while count := channel.next_request():
            clock, steps = StepClock(), []
            for _ in range(count):
                report, _ = trainer.run_step()
                steps.append(sample(clock.lap(), report.metrics))
            channel.block(steps)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
