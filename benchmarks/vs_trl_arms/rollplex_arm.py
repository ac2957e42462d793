"""Rollplex's arm: the trainer's own step, driven block by block."""

from __future__ import annotations

from typing import Any

import torch

from rollplex.config import Config
from rollplex.runtime.collect import Collector
from rollplex.runtime.learner import Learner
from rollplex.runtime.session import PromptFeed, build_session
from rollplex.tasks.rewards import RewardRunner, TrainerState
from rollplex.train.optimizer import PolicyOptimizer
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


def sample(seconds: float, metrics: dict[str, Any]) -> dict[str, float]:
    """The report of one step."""
    return {
        "seconds": seconds,
        "mean_length": metrics["completions/mean_length"],
        "min_length": metrics["completions/min_length"],
        "max_length": metrics["completions/max_length"],
        "reward": metrics["reward"],
        **{key: value for key, value in metrics.items() if key.startswith("timing_s/")},
    }


def main() -> None:
    """Load, report, and run blocks until the parent closes the pipe."""
    channel = Channel()
    config = config_of(channel.spec)
    session = build_session(config)
    rewards = RewardRunner(config.rewards)
    optimizer = PolicyOptimizer(session.policy.model, config.train, config.train.max_steps)
    collector = Collector(session.tokenizer, rewards, config.rewards.timeout_s)
    learner = Learner(session.policy, optimizer, None, collector, config, stop_token_ids=session.stop_token_ids)
    feed = PromptFeed(session)
    channel.ready(("rollplex", "torch", "transformers", "datasets"), {"threads": torch.get_num_threads()})
    step = 0
    while count := channel.next_request():
        clock, steps = StepClock(), []
        for _ in range(count):
            outcome = learner.step(feed.take, TrainerState(step, config.train.max_steps))
            step += 1
            steps.append(sample(clock.lap(), outcome.metrics))
        channel.block(steps)
    feed.close()
    rewards.close()


if __name__ == "__main__":
    main()
