"""When a run writes to weights that engines may read in place, and when it tells engines of new ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.models.policy import Policy
from rollplex.rollout.engines import LocalEngines
from rollplex.runtime.trainer import Trainer

STEPS = 2


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between responses."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class Watched(LocalEngines):
    """Says what it is asked, and with which weights."""

    def __init__(self, policy: Policy, max_rows: int):
        super().__init__(policy, max_rows)
        self.asked: list[tuple[str, int]] = []

    def open(self, *args: Any, **kwargs: Any) -> Any:
        """Note it."""
        self.asked.append(("rollout", self.policy.weight_version))
        return super().open(*args, **kwargs)

    def begin_publish(self) -> None:
        """Note it."""
        self.asked.append(("publish", self.policy.weight_version))

    @contextmanager
    def writing(self, who: str) -> Iterator[None]:
        """Note the versions before and after."""
        assert who.startswith("optimizer step ")
        self.asked.append(("before", self.policy.weight_version))
        yield
        self.asked.append(("after", self.policy.weight_version))


@pytest.mark.parametrize(("parts", "epochs", "schedule"), [(1, 2, "serial"), (2, 1, "rollplex"), (1, 1, "stream")])
def test_a_publish_begins_after_the_last_optimizer_step_of_a_rollout(
    tmp_path: Path, parts: int, epochs: int, schedule: str
) -> None:
    """Of each rollout but the last, whose weights nobody samples from; and every write is announced."""
    config = Config.model_validate(
        {
            "run": {"output_dir": str(tmp_path), "num_threads": 1, "log_completions_steps": 0},
            "model": {"build": {}},
            "data": {"task": "mixed", "image_size": 56},
            "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
            "algorithm": {"steps_per_generation": parts, "num_iterations": epochs},
            "rewards": {"reward_funcs": [f"{__file__}:length_reward"]},
            "train": {"max_steps": STEPS},
            "schedule": {"name": schedule, "overlap": "off"},
        }
    )
    trainer = Trainer(config)
    watched = trainer.learner.engines = Watched(trainer.session.policy, 64)
    try:
        for _ in range(STEPS):
            trainer.run_step()
    finally:
        trainer.close()
    wanted, version = list[tuple[str, int]](), watched.asked[0][1]
    for step in range(STEPS):
        wanted.append(("rollout", version))
        for _ in range(parts * epochs):
            wanted += [("before", version), ("after", version + 1)]
            version += 1
        if step + 1 < STEPS:
            wanted.append(("publish", version))
    assert watched.asked == wanted
