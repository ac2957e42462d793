"""What is learnt: the Task protocol and the registry of built-in tasks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from rollplex.config import DataConfig
from rollplex.errors import ConfigError
from rollplex.types import Example

# TRL's signature: keywords in, one float or None per completion out (or a coroutine of that).
RewardFunction = Callable[..., Any]

TASKS: dict[str, str] = {
    "counting": "rollplex.tasks.synthetic:Counting",
    "colour_shape": "rollplex.tasks.synthetic:ColourShape",
    "motion": "rollplex.tasks.synthetic:Motion",
    "mixed": "rollplex.tasks.synthetic:Mixed",
    "easy_vqa": "rollplex.tasks.easy_vqa:EasyVqa",
    "files": "rollplex.tasks.files:FilesTask",
}


@runtime_checkable
class Task(Protocol):
    """Numbered examples with a default reward. Made as `Name(config, split, seed)`.

    The same (config, split, seed, index) always gives the same example; `example` may be called from several threads.
    """

    reward_funcs: Sequence[RewardFunction]  # used when rewards.reward_funcs is empty; may be empty itself

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def example(self, index: int) -> Example:
        """Example `index` with its media decoded now. Raises RowError."""
        ...

    def texts(self) -> Iterator[str]:
        """Strings that cover prompts and answers, to train a small tokenizer on; no media is decoded."""
        ...


def build_task(config: DataConfig, split: str, seed: int) -> Task:
    """Make the task that `data.task` names, for one split. Raises ConfigError for an unknown or unusable name."""
    target = TASKS.get(config.task, config.task)
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"data.task {config.task!r} is not a task; needed one of {', '.join(TASKS)}, or 'module:Name'"
        )
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.task {config.task!r}: no module named {error.name!r}") from error
    except AttributeError as error:
        raise ConfigError(f"data.task {config.task!r}: module {module_name} has no {attribute!r}") from error
    try:
        task = factory(config, split, seed)
    except TypeError as error:
        raise ConfigError(
            f"data.task {config.task!r} cannot be made as {attribute}(config, split, seed): {error}"
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(f"data.task {config.task!r}: {attribute} lacks one of reward_funcs, len, example and texts")
    if len(task) == 0:
        raise ConfigError(f"data.task {config.task!r} has no rows in split {split!r}")
    return task
