"""Where rows are stored: JSONL, parquet, a saved `datasets` folder, or a hub id; one call opens any of them.

Rows come out undecoded (images and videos as stored bytes or paths), so that `tasks.rows` does all decoding and its
errors name the row.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets

from rollplex.errors import ConfigError, RowError

_LONE_SPLIT = "train"  # what a file without named splits holds, as in `datasets`


class RowSource(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Row `index`, media undecoded. Safe to call from several threads."""
        ...


@dataclass(frozen=True)
class OpenSource:
    """A source and the folder that its relative media paths start from (None: the working directory)."""

    rows: RowSource
    base_dir: Path | None


def open_source(path: str, split: str) -> OpenSource:
    """Open the rows of `split` at `path`: *.jsonl / *.json lines, *.parquet, a folder, or a hub id.

    `{split}` inside the path is replaced by the split's name; a single file without it holds the split "train".
    Raises ConfigError when the path, its kind, or the split cannot be used.
    """
    per_split = "{split}" in path
    place = Path(path.replace("{split}", split))
    if place.is_file():
        if not per_split and split != _LONE_SPLIT:
            raise ConfigError(
                f"data.path {path} is one file, it holds the split 'train', but {split!r} is asked for; "
                "name one file per split with '{split}' in the path"
            )
        return OpenSource(_open_file(place), place.parent)
    if place.is_dir():
        return OpenSource(_open_folder(place, split, per_split), place)
    if place.suffix or place.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(f"data.path {place} does not exist")
    return OpenSource(TableRows(_load_dataset(path, split)), None)


class JsonLines:
    """A JSONL file read line by line through a memory map: rows keep exactly the types they were written with.

    (Arrow would give all rows one schema: null keys, and no mix of string and list contents.) Blank lines are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[tuple[int, int]] = []
        if path.stat().st_size == 0:
            return
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = 0
        while start < len(self._map):
            end = self._map.find(b"\n", start)
            end = len(self._map) if end < 0 else end
            if self._map[start:end].strip():
                self._lines.append((start, end))
            start = end + 1

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Mapping[str, Any]:
        """Row `index`; raises RowError when the line is not a JSON object."""
        start, end = self._lines[index]
        try:
            row = json.loads(self._map[start:end])
        except ValueError as error:
            raise RowError(f"row {index}: not valid JSON in {self._path} ({error})") from error
        if not isinstance(row, dict):
            raise RowError(f"row {index}: needed a JSON object in {self._path}, found {type(row).__name__}")
        return row


class TableRows:
    """Rows of a `datasets` table, with image and video decoding switched off."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self._dataset = dataset.with_format("arrow")
        self._features = datasets.Features({name: _undecoded(f) for name, f in dataset.features.items()})

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Mapping[str, Any]:
        """Row `index` as Python objects; images and videos as {"bytes", "path"}."""
        stored = self._dataset[index].to_pylist()[0]
        row: dict[str, Any] = self._features.decode_example(stored)
        return row


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, (datasets.Image, datasets.Video, datasets.Audio)):
        return datasets.Value("null")  # decode_example then leaves the stored {"bytes", "path"} alone
    if isinstance(feature, dict):
        return {key: _undecoded(inner) for key, inner in feature.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_undecoded(feature.feature))
    return feature


def _open_file(path: Path) -> RowSource:
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return JsonLines(path)
    if path.suffix == ".parquet":
        return TableRows(datasets.Dataset.from_parquet(str(path)))
    raise ConfigError(f"data.path {path} must end in .jsonl, .json or .parquet, or be a folder")


def _open_folder(path: Path, split: str, per_split: bool) -> RowSource:
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return TableRows(_load_dataset(str(path), split))
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path {path} is not a usable saved dataset ({error})") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ConfigError(f"data.path {path} has no split {split!r}, it has {', '.join(sorted(saved))}")
        return TableRows(saved[split])
    own = str(saved.split) if saved.split is not None else _LONE_SPLIT
    if not per_split and split != own:
        raise ConfigError(f"data.path {path} holds the split {own!r}, but {split!r} is asked for")
    return TableRows(saved)


def _load_dataset(path: str, split: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"data.path {path}, split {split!r}, cannot be loaded by `datasets` ({error})") from error
