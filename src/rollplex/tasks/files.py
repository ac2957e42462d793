"""Rows from files as a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollplex.config import DataConfig
from rollplex.errors import ConfigError
from rollplex.tasks.rows import MEDIA_COLUMNS, example_from_row, row_from_verl
from rollplex.tasks.sources import open_source
from rollplex.tasks.task import RewardFunction
from rollplex.types import Example

_MOST_TEXT_ROWS = 2000  # rows that a small tokenizer is trained on
_NO_TEXT = {name for names in MEDIA_COLUMNS.values() for name in names}


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
                if key not in _NO_TEXT:
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
