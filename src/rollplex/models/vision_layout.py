"""Where patches are and which of them attend to each other: what a vision tower needs to know of its pictures.

All of it follows from the grids, on the host: transformers works it out in every call, picture by picture, with
operations on the device that it then waits for. Here a frame's part is worked out once (by transformers' own
functions), kept, and put together for each call. Runs of equal length are brought next to each other, so that all
windows of a length attend in one call.
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

PatchGrid = tuple[int, int, int]
"""Frames, rows and columns of patches of one picture or video."""

_FRAMES_KEPT = 128  # sizes of frames whose layout is kept


@dataclass(frozen=True, slots=True)
class TowerShape:
    """What the layout of a tower's pictures depends on beside their grids."""

    merge: int  # patches per side of a token
    patch: int  # pixels per side of a patch
    window: int | None = None  # pixels per side of a window; None: all blocks attend within whole frames
    learned_side: int | None = None  # side of the grid of learned positions; None: there are none


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows that attend to each other, and to no others: `groups` of (how many, rows of each), one after the other."""

    groups: tuple[tuple[int, int], ...]
    order: NDArray[np.int64] | None = None  # (N,) rows brought into the order of `groups`; None: they are in it


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """Of the N patches of a call, in the order in which the blocks see them."""

    positions: NDArray[np.int64]  # (N, 2) row and column
    frames: Runs
    windows: Runs | None = None
    tokens: NDArray[np.int64] | None = (
        None  # (N / merge^2,) tokens brought into the blocks' order; None: they are in it
    )
    taps: NDArray[np.int64] | None = None  # (N, 4) learned positions to mix for each patch
    weights: NDArray[np.float32] | None = None  # (N, 4)


@dataclass(frozen=True, slots=True)
class _Frame:
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]
    windows: NDArray[np.int64]  # (N,) the window of each patch in the order of `tokens`, from 0
    taps: NDArray[np.int64] | None
    weights: NDArray[np.float32] | None


@lru_cache(_FRAMES_KEPT)
def _frame(rows: int, columns: int, shape: TowerShape) -> _Frame:
    """One frame by itself, patches in the order of windows."""
    grid, taps, weights = torch.tensor([[1, rows, columns]]), None, None
    positions = get_vision_position_ids(grid, shape.merge).numpy()
    if shape.learned_side is not None:
        mixed = get_vision_interpolation_indices_and_weights(
            grid, shape.learned_side, mode="bilinear", align_corners=True, spatial_merge_size=shape.merge
        )
        taps, weights = (part.numpy() for part in mixed)
    group = shape.merge**2
    tokens = np.arange(rows * columns // group)
    windows = np.zeros(rows * columns, np.int64)
    if shape.window is not None:
        index, ends = get_vision_window_index(grid, shape.merge, shape.window, shape.patch)
        tokens = index.numpy()
        windows = np.repeat(np.arange(len(ends) - 1), np.diff(ends.numpy()))
        positions = positions.reshape(len(tokens), group, 2)[tokens].reshape(-1, 2)
    return _Frame(positions, tokens, windows, taps, weights)


def vision_layout(grids: Sequence[PatchGrid], shape: TowerShape) -> VisionLayout:
    """The layout of pictures and videos that go through a tower together."""
    frames = [_frame(rows, columns, shape) for count, rows, columns in grids for _ in range(count)]
    sizes = np.array([len(frame.tokens) for frame in frames])
    positions = np.concatenate([frame.positions for frame in frames])
    group = shape.merge**2
    frame_of_row = np.repeat(np.arange(len(frames)), sizes * group)
    if shape.window is None:
        taps = [frame.taps for frame in frames if frame.taps is not None]
        weights = [frame.weights for frame in frames if frame.weights is not None]
        return VisionLayout(
            positions,
            _runs(frame_of_row),
            taps=np.concatenate(taps) if taps else None,
            weights=np.concatenate(weights) if weights else None,
        )
    tokens = np.concatenate([frame.tokens for frame in frames]) + np.repeat(np.cumsum(sizes) - sizes, sizes)
    counts = np.array([frame.windows[-1] + 1 for frame in frames])
    window_of_row = np.concatenate([frame.windows for frame in frames])
    window_of_row += np.repeat(np.cumsum(counts) - counts, sizes * group)
    # Most blocks attend within windows: theirs is the order that all blocks see.
    windows = _runs(window_of_row)
    if windows.order is not None:
        tokens = tokens[windows.order[::group] // group]
        positions, frame_of_row = positions[windows.order], frame_of_row[windows.order]
    in_place = bool((tokens == np.arange(len(tokens))).all())
    return VisionLayout(positions, _runs(frame_of_row), Runs(windows.groups), None if in_place else tokens)


def _runs(run_of_row: NDArray[np.int64]) -> Runs:
    """Runs of equal length next to each other, the shortest first, else in the order of their numbers."""
    lengths = np.bincount(run_of_row)
    order = np.lexsort((run_of_row, lengths[run_of_row]))
    present, counts = np.unique(lengths, return_counts=True)
    groups = tuple((int(count), int(length)) for length, count in zip(present, counts, strict=True))
    return Runs(groups, None if bool((order == np.arange(len(order))).all()) else order)
