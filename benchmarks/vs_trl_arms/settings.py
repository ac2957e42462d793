"""What is measured: the table of settings, and the specification that an arm's process is started with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REWARD = f"{Path(__file__).with_name('reward.py')}:length_reward"


@dataclass(frozen=True, slots=True)
class Setting:
    """Shape of one step: `prompts` x `responses` completions of exactly `tokens` tokens after `images` pictures."""

    name: str
    images: int  # pictures per prompt
    image_size: int  # pixels per side
    tokens: int  # tokens of every response
    ratio_target: float  # step time TRL / Rollplex that issue 2 asks for
    memory_target: float | None  # peak memory Rollplex / TRL that issue 2 asks for; None: no demand
    prompts: int = 4
    responses: int = 8


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("S1", images=4, image_size=224, tokens=64, ratio_target=4.0, memory_target=0.6),
        Setting("S2", images=1, image_size=112, tokens=32, ratio_target=1.5, memory_target=None),
        Setting("S3", images=16, image_size=224, tokens=64, ratio_target=8.0, memory_target=0.6),
        Setting("S4", images=4, image_size=224, tokens=256, ratio_target=2.0, memory_target=None),
    )
}


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """Everything an arm needs to know; the same for both but for `micro_batch`, which only TRL reads."""

    model: str  # model folder, Hugging Face format
    rows: str  # saved datasets folder with columns prompt, images, answer
    prompts: int
    responses: int
    tokens: int  # max_completion_length
    threads: int
    reward: str  # 'file.py:function', TRL's keyword call
    seed: int = 0
    learning_rate: float = 1e-6
    loss_type: str = "dapo"
    max_steps: int = 100_000
    shuffle: bool = False
    micro_batch: int | None = None  # TRL's per_device_train_batch_size; None: the whole batch at once

    def to_json(self) -> dict[str, Any]:
        """Plain values for the pipe and the result file."""
        return asdict(self)
