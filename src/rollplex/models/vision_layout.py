"""Where patches are and which of them attend to each other: what a vision tower needs to know of its pictures.

All of it follows from the grids, on the host: transformers works it out in every call, picture by picture, with
operations on the device that it then waits for. Here a frame's part is worked out by transformers' own functions and
kept for the next frame of the same size; a call puts parts together. Runs of equal length come next to each other, so
that all windows of a length attend in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from rollplex.types import PatchGrid

Index = NDArray[np.int64]

_FRAMES_KEPT = 128  # sizes of frames, of some 100 bytes a patch


@dataclass(frozen=True, slots=True)
class LearnedGrid:
    """How a square grid of learned positions is resampled to a frame's."""

    side: int
    mode: str
    align_corners: bool


@dataclass(frozen=True, slots=True)
class TowerShape:
    """What the layout of a tower's pictures depends on beside their grids. No family has windows and learned positions;
    ValueError for both."""

    merge: int  # patches per side of a token
    patch: int  # pixels per side of a patch
    window: int | None = None  # pixels per side of a window; None: all blocks attend within whole frames
    learned: LearnedGrid | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.learned is not None:
            raise ValueError("a tower with windows and learned positions: learned ones would need the windows' order")


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows that attend to each other, and to no others: `groups` of (how many, rows of each), one after the other."""

    groups: tuple[tuple[int, int], ...]
    order: Index | None = None  # (N,) which row comes where in `groups`; None: they are in that order


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """Each patch's position as a mix of learned ones."""

    taps: Index  # (N, 4)
    weights: NDArray[np.float32]  # (N, 4)


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """Of the N patches of a call, in the order in which the blocks see them."""

    positions: Index  # (N, 2) row and column
    frames: Runs
    windows: Runs | None = None
    # (N / merge^2,) which token of the pictures comes where; None: the blocks see them in the pictures' order
    tokens: Index | None = None
    learned: LearnedPositions | None = None


@dataclass(frozen=True, slots=True)
class _Frame:
    """One frame by itself, patches in the order of windows."""

    positions: Index
    tokens: Index
    windows: Index  # patches in each
    learned: LearnedPositions | None


@lru_cache(_FRAMES_KEPT)
def _frame(rows: int, columns: int, shape: TowerShape) -> _Frame:
    grid, group = torch.tensor([[1, rows, columns]]), shape.merge**2
    positions = get_vision_position_ids(grid, shape.merge).numpy()
    tokens, windows, learned = np.arange(rows * columns // group), np.array([rows * columns]), None
    if shape.learned is not None:
        taps, weights = get_vision_interpolation_indices_and_weights(
            grid,
            shape.learned.side,
            mode=shape.learned.mode,
            align_corners=shape.learned.align_corners,
            spatial_merge_size=shape.merge,
        )
        learned = LearnedPositions(taps.numpy(), weights.numpy())
    if shape.window is not None:
        index, ends = get_vision_window_index(grid, shape.merge, shape.window, shape.patch)
        tokens, windows = index.numpy(), np.diff(ends.numpy()).astype(np.int64)
        positions = positions.reshape(len(tokens), group, 2)[tokens].reshape(-1, 2)
    return _Frame(positions, tokens, windows, learned)


def vision_layout(grids: Sequence[PatchGrid], shape: TowerShape) -> VisionLayout:
    """The layout of pictures and videos that go through a tower together."""
    frames = [_frame(rows, columns, shape) for count, rows, columns in grids for _ in range(count)]
    positions = np.concatenate([frame.positions for frame in frames])
    patches = np.array([len(frame.positions) for frame in frames])
    if shape.window is None:
        return VisionLayout(positions, _runs(patches), learned=_together([frame.learned for frame in frames]))
    group = shape.merge**2
    sizes = patches // group
    tokens = np.concatenate([frame.tokens for frame in frames]) + np.repeat(np.cumsum(sizes) - sizes, sizes)
    # Most blocks attend within windows: theirs is the order that all blocks see.
    windows, within_frames = _runs(np.concatenate([frame.windows for frame in frames])), _runs(patches)
    if windows.order is not None:
        tokens, positions = tokens[windows.order[::group] // group], positions[windows.order]
        within_frames = _scattered_runs(np.repeat(np.arange(len(frames)), patches)[windows.order], patches)
    return VisionLayout(positions, within_frames, Runs(windows.groups), _unless_in_place(tokens))


def _together(parts: Sequence[LearnedPositions | None]) -> LearnedPositions | None:
    given = [part for part in parts if part is not None]
    if not given:
        return None
    return LearnedPositions(np.concatenate([p.taps for p in given]), np.concatenate([p.weights for p in given]))


def _runs(lengths: Index) -> Runs:
    """Of runs one after the other: equal ones next to each other, the shortest first, else in the order they have."""
    order = _unless_in_place(np.argsort(lengths, kind="stable"))
    if order is None:
        return Runs(_groups(lengths))
    # A run's rows stay together: each row's place among its run's, from where the run began.
    starts, ordered = (np.cumsum(lengths) - lengths)[order], lengths[order]
    places = np.arange(ordered.sum()) - np.repeat(np.cumsum(ordered) - ordered, ordered)
    return Runs(_groups(lengths), np.repeat(starts, ordered) + places)


def _scattered_runs(run_of_row: Index, lengths: Index) -> Runs:
    """The same of runs whose rows are not together."""
    return Runs(_groups(lengths), _unless_in_place(np.lexsort((run_of_row, lengths[run_of_row]))))


def _unless_in_place(order: Index) -> Index | None:
    """None for an order that moves nothing: nobody then gathers by it."""
    return None if (order == np.arange(len(order))).all() else order


def _groups(lengths: Index) -> tuple[tuple[int, int], ...]:
    present, counts = np.unique(lengths, return_counts=True)
    return tuple((int(count), int(length)) for length, count in zip(present, counts, strict=True))
