"""What is learnt: the Task protocol, the registry of built-in tasks, and rows from files as a task."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rollplex.config import DataConfig
from rollplex.errors import ConfigError
from rollplex.tasks.rows import example_from_row, row_from_verl
from rollplex.tasks.sources import open_source
from rollplex.types import Example

logger = logging.getLogger(__name__)

# TRL's signature: keywords in, one float or None per completion out (or a coroutine of that).
RewardFunction = Callable[..., Any]

TASKS: dict[str, str] = {
    "counting": "rollplex.tasks.synthetic:Counting",
    "colour_shape": "rollplex.tasks.synthetic:ColourShape",
    "motion": "rollplex.tasks.synthetic:Motion",
    "mixed": "rollplex.tasks.synthetic:Mixed",
    "easy_vqa": "rollplex.tasks.easy_vqa:EasyVqa",
    "files": "rollplex.tasks.task:FilesTask",
}
_MOST_TEXT_ROWS = 2000  # rows of a file that a small tokenizer is trained on


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
    task = factory(config, split, seed)
    if not isinstance(task, Task):
        raise ConfigError(f"data.task {config.task!r}: {attribute} lacks one of reward_funcs, len, example and texts")
    if len(task) == 0:
        raise ConfigError(f"data.task {config.task!r} has no rows in split {split!r}")
    return task


class FilesTask:
    """Rows from `data.path` in TRL's shape, or verl's (known by its `reward_model` column)."""

    reward_funcs: Sequence[RewardFunction] = ()

    def __init__(self, config: DataConfig, split: str, seed: int) -> None:
        if config.path is None:
            raise ConfigError("data.task files needs data.path: a JSONL or parquet file, a saved dataset, or a hub id")
        self._source = open_source(config.path, split)
        self._config = config
        found = len(self._source.rows)
        self._length = found if config.num_rows is None else min(config.num_rows, found)

    def __len__(self) -> int:
        return self._length

    def _row(self, index: int) -> Mapping[str, Any]:
        row = self._source.rows.row(index)
        return row_from_verl(index, row) if row.get("reward_model") is not None else row

    def example(self, index: int) -> Example:
        """Row `index` with its media decoded. Raises RowError."""
        return example_from_row(
            index,
            self._row(index),
            video_fps=self._config.video_fps,
            max_frames=self._config.max_frames,
            base_dir=self._source.base_dir,
        )

    def texts(self) -> Iterator[str]:
        """Every string of the first rows' prompts and further columns."""
        for index in range(min(self._length, _MOST_TEXT_ROWS)):
            row = self._row(index)
            for key, value in row.items():
                if key not in ("image", "images", "video", "videos"):
                    yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)
