"""What a run is made of, built from its configuration in one place: task, model, processor, prompts, stop ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollplex.config import Config
from rollplex.models.load import LoadedModel, load_model
from rollplex.models.policy import Policy
from rollplex.models.prompts import PromptBuilder
from rollplex.parallel.arrangement import arrangement
from rollplex.runtime.collect import Slot
from rollplex.runtime.device import device_of
from rollplex.runtime.prefetch import Prefetcher
from rollplex.tasks.order import DataOrder
from rollplex.tasks.task import Task, build_task
from rollplex.types import Example, PromptSpec


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run that do not change while it runs (the policy's weights aside)."""

    config: Config
    task: Task
    loaded: LoadedModel
    policy: Policy
    prompts: PromptBuilder
    stop_token_ids: tuple[int, ...]

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return self.loaded.processor.tokenizer

    def answer_ids(self, text: str) -> list[int]:
        """Ids of a supervised answer, closed by the first stop id."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.stop_token_ids[0]]


def build_session(config: Config, *, processor_path: Path | None = None, processes: int = 1) -> Session:
    """Task, model and processor of `config`. `processor_path`: the folder where a model that is built again was saved,
    whose tokenizer it must keep. processes: of the run; each begins with the whole model."""
    arrangement(config, processes)
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    task = build_task(config.data, config.data.split, config.run.seed)
    loaded = load_model(config.model, texts=task.texts(), seed=config.run.seed, processor_path=processor_path)
    loaded.model.to(device_of(config.run.device))
    prompts = PromptBuilder(loaded.processor, loaded.model.config, config.data)
    stops = _stop_ids(loaded, config)
    policy = Policy(loaded.model, chunk_tokens=config.schedule.chunk_tokens)
    return Session(config, task, loaded, policy, prompts, stops)


def _stop_ids(loaded: LoadedModel, config: Config) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's, the generation config's, the rollout's, in this order, once each."""
    found: list[int] = []
    generation = getattr(loaded.model, "generation_config", None)
    for source in (
        loaded.processor.tokenizer.eos_token_id,
        getattr(generation, "eos_token_id", None),
        config.rollout.stop_token_ids,
    ):
        ids = source if isinstance(source, (list, tuple)) else [source]
        found += [i for i in ids if i is not None and i not in found]
    return tuple(found)


class PromptFeed:
    """Prompts in data order as numbered slots. `position` and `next_rollout_id` are all that a resume needs."""

    def __init__(self, session: Session, *, position: int = 0, next_rollout_id: int = 0):
        config = session.config
        order = DataOrder(len(session.task), config.run.seed, config.data.shuffle)
        self.order = order
        self.next_rollout_id = next_rollout_id
        ahead = max(2 * config.rollout.prompts_per_step, 2 * config.data.media_workers)
        self.prefetcher = Prefetcher(
            session.task.example, session.prompts.build, order, config.data, start=position, ahead=ahead
        )

    @property
    def position(self) -> int:
        """Rows consumed so far, dropped ones included."""
        return self.prefetcher.position

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""
        return self.order.epochs_at(self.position)

    @property
    def dropped(self) -> int:
        """Rows left out by data.overlong=drop."""
        return self.prefetcher.dropped

    def take(self, count: int) -> list[Slot]:
        """The next `count` prompts."""
        slots = []
        for _ in range(count):
            example, spec = next(self.prefetcher)
            slots.append(Slot(self.next_rollout_id, example, spec))
            self.next_rollout_id += 1
        return slots

    def rows(self) -> Iterator[tuple[Example, PromptSpec]]:
        """The same prompts without slots (warm start)."""
        return self.prefetcher

    def close(self) -> None:
        """Stop the media threads."""
        self.prefetcher.close()
