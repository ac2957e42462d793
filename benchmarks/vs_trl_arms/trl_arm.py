"""TRL's arm: GRPOTrainer with transformers generation, driven block by block through trainer callbacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from vs_trl_arms.channel import Channel, StepClock
from vs_trl_arms.settings import ArmSpec

# What Rollplex bans too; TRL bans the first by itself, its `generation_kwargs` replace that list by all four.
VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class RecordedReward:
    """The reward function, with the lengths and mean reward of the last rollout kept for the report."""

    def __init__(self, target: str) -> None:
        path, _, name = target.rpartition(":")
        module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if module_spec is None or module_spec.loader is None:
            raise ValueError(f"reward {target!r} is not 'file.py:function'")
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        self._function: Callable[..., list[float]] = getattr(module, name)
        self.__name__ = name
        self.lengths: list[int] = []
        self.rewards: list[float] = []

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rewards = self._function(completions=completions, completion_ids=completion_ids, **columns)
        self.lengths = [len(ids) for ids in completion_ids]
        self.rewards = rewards
        return rewards

    def sample(self, lap: dict[str, float]) -> dict[str, float]:
        """The report of one step."""
        return {
            **lap,
            "mean_length": sum(self.lengths) / len(self.lengths),
            "min_length": min(self.lengths),
            "max_length": max(self.lengths),
            "reward": sum(self.rewards) / len(self.rewards),
        }


class Blocks(TrainerCallback):
    """Holds the trainer between blocks and times its steps.

    A step runs from the end of the one before it (or the request) to `on_step_end`: fetching the rows, generation,
    scoring, backward, optimizer. The parent checks the sum against its own clock.
    """

    def __init__(self, channel: Channel, reward: RecordedReward, extra: dict[str, Any]) -> None:
        self._channel, self._reward, self._extra = channel, reward, extra
        self._steps: list[dict[str, float]] = []
        self._left = 0
        self._clock = StepClock()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._channel.ready(("trl", "torch", "transformers", "accelerate", "datasets"), self._extra)
        return self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._steps.append(self._reward.sample(self._clock.lap()))
        self._left -= 1
        if self._left > 0:
            return control
        self._channel.block(self._steps)
        return self._wait(control)

    def _wait(self, control: Any) -> Any:
        self._steps, self._left = [], self._channel.next_request()
        control.should_training_stop = self._left == 0
        self._clock = StepClock()
        return control


def grpo_config(spec: ArmSpec, banned: list[int]) -> GRPOConfig:
    """TRL's configuration of the spec: the shared settings, no logging, TRL's own choices elsewhere."""
    batch = spec.prompts * spec.responses
    micro_batch = spec.micro_batch or batch
    if batch % micro_batch:
        raise ValueError(f"micro-batch {micro_batch} does not divide the {batch} responses of a step")
    return GRPOConfig(
        output_dir="trl_out",
        use_cpu=True,
        bf16=False,
        seed=spec.seed,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        num_generations=spec.responses,
        max_completion_length=spec.tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs={"suppress_tokens": banned},
        loss_type=spec.loss_type,
        beta=0.0,
        learning_rate=spec.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=spec.max_steps,
        shuffle_dataset=spec.shuffle,
        gradient_checkpointing=False,  # faster; with it TRL would need less memory
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_completions=False,
        dataloader_num_workers=0,
    )


def main() -> None:
    """Load, report, and run blocks until the parent closes the pipe."""
    channel = Channel()
    spec = channel.spec
    model = AutoModelForImageTextToText.from_pretrained(spec.model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(spec.model)
    banned = sorted({int(getattr(model.config, name)) for name in VISION_TOKENS})
    reward = RecordedReward(spec.reward)
    args = grpo_config(spec, banned)
    extra = {
        "threads": torch.get_num_threads(),
        "optimizer": str(args.optim),
        "micro_batch": args.per_device_train_batch_size,
        "gradient_checkpointing": args.gradient_checkpointing,
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[cast(Any, reward)],  # its type wants list[float | None], which list[float] is not
        args=args,
        train_dataset=datasets.load_from_disk(spec.rows),
        processing_class=processor,
        callbacks=[Blocks(channel, reward, extra)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
