"""The tower's own forward against transformers', and the layout of pictures against transformers' windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from rollplex.config import BuildConfig
from rollplex.errors import ModelError
from rollplex.models.adapter import adapter_for
from rollplex.models.build import build_model, build_processor
from rollplex.models.precision import full_float64
from rollplex.models.tower import VisionTower
from rollplex.models.vision_layout import LearnedGrid, Runs, TowerShape, VisionLayout, vision_layout
from rollplex.types import PatchGrid, PromptSpec

WINDOWED = TowerShape(merge=2, patch=14, window=112)
LEARNED = LearnedGrid(16, "bilinear", align_corners=True)
SIDES = st.integers(1, 9).map(lambda tokens: 2 * tokens)
GRIDS = st.lists(st.tuples(st.integers(1, 3), SIDES, SIDES), min_size=1, max_size=4)
MIXES: dict[str, list[PatchGrid]] = {
    "one": [(1, 16, 16)],
    "equal": [(1, 16, 16)] * 4,
    "smaller than a window": [(1, 2, 2), (1, 4, 6)],
    "unequal": [(1, 8, 8), (1, 16, 12)],
    "with videos": [(4, 6, 22), (1, 2, 2), (1, 20, 12), (2, 16, 16)],
}
BOUND = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of the norm; gradients: ten times that
Parts = tuple[torch.Tensor, ...]


def visual_of(family: str, dtype: torch.dtype) -> Any:
    config = BuildConfig.model_validate({"family": family, "vision_depth": 4})
    visual = build_model(config, build_processor(family, ["a b c"], 400), seed=0, dtype=dtype).model.visual
    draw = torch.Generator().manual_seed(1)
    for parameter in visual.parameters():  # norms and biases too
        parameter.data = (0.1 * torch.randn(parameter.shape, generator=draw)).to(dtype)
    return visual


def pixels_of(visual: Any, grids: list[PatchGrid], dtype: torch.dtype) -> torch.Tensor:
    patches = sum(frames * rows * columns for frames, rows, columns in grids)
    numbers = visual.patch_embed.proj.weight[0].numel()
    return torch.randn(patches, numbers, generator=torch.Generator().manual_seed(2)).to(dtype)


def theirs(visual: Any, pixels: torch.Tensor, grids: list[PatchGrid]) -> Parts:
    output = visual(pixels, grid_thw=torch.tensor(grids))
    return (output.pooler_output, *getattr(output, "deepstack_features", ()))


def with_gradients(visual: Any, run: Callable[[], Parts]) -> tuple[Parts, dict[str, torch.Tensor]]:
    visual.zero_grad()
    parts = run()
    draw = torch.Generator().manual_seed(3)
    loss = sum((part * torch.randn(part.shape, generator=draw).to(part.dtype)).sum() for part in parts)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return parts, {name: p.grad for name, p in visual.named_parameters() if p.grad is not None}


def apart(found: torch.Tensor, right: torch.Tensor) -> float:
    return float(((found - right).double().norm() / right.double().norm()).detach())


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_features_and_gradients_are_those_of_transformers(family: str, mix: str, dtype: torch.dtype) -> None:
    visual, grids = visual_of(family, dtype), MIXES[mix]
    pixels = pixels_of(visual, grids, dtype)
    with full_float64():
        right, right_gradients = with_gradients(visual, lambda: theirs(visual, pixels, grids))
        found, gradients = with_gradients(visual, lambda: VisionTower(visual)(pixels, grids))
    assert len(found) == len(right) and gradients.keys() == right_gradients.keys()
    assert max(map(apart, found, right)) < BOUND[dtype]
    # Keys have no gradient from their bias, but for rounding.
    largest = max(float(gradient.double().norm()) for gradient in right_gradients.values())
    for name, gradient in gradients.items():
        difference = float((gradient.double() - right_gradients[name].double()).norm())
        own = float(right_gradients[name].double().norm())
        assert difference < 10 * BOUND[dtype] * max(own, 0.01 * largest), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_float64_casts_where_transformers_does(family: str) -> None:
    visual, grids = visual_of(family, torch.float64), MIXES["unequal"]
    for block in visual.blocks:
        block.attn.qkv.weight.data.mul_(10)  # so that attention, and with it the rotation, tells
    pixels = pixels_of(visual, grids, torch.float64)
    with torch.no_grad():
        found, right = VisionTower(visual)(pixels, grids)[0], theirs(visual, pixels, grids)[0]
        with full_float64():
            wide = VisionTower(visual)(pixels, grids)[0]
            assert apart(wide, theirs(visual, pixels, grids)[0]) < 1e-12
    assert apart(found, right) < 1e-6  # float32's rounding, once where transformers has it twice
    assert 1e-10 < apart(found, wide) < 1e-6


def test_pictures_do_not_see_each_other_and_keep_their_order() -> None:
    visual = visual_of("qwen2_5_vl", torch.float64)
    grids = MIXES["with videos"]
    pixels, tower = pixels_of(visual, grids, torch.float64), VisionTower(visual)
    sizes = [frames * rows * columns for frames, rows, columns in grids]
    with torch.no_grad(), full_float64():
        (together,) = tower(pixels, grids)
        for alone, part, grid in zip(pixels.split(sizes), together.split([s // 4 for s in sizes]), grids, strict=True):
            assert apart(part, tower(alone, [grid])[0]) < 1e-13


@pytest.mark.parametrize("grids", [[(1, 2, 2)], [(1, 2, 10)], [(1, 6, 6), (1, 2, 4)]])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_few_tokens_have_the_features_of_the_ordinary_path(family: str, grids: list[PatchGrid]) -> None:
    """1, 5 and 11 tokens: the last two with a blank picture beside them on either path."""
    config = BuildConfig.model_validate({"family": family})
    adapter = adapter_for(build_model(config, build_processor(family, ["a b c"], 400), seed=0))
    pixels = pixels_of(adapter.visual, grids, torch.float32)
    spec = PromptSpec(0, *4 * (torch.zeros(1),), pixels, torch.tensor(grids), None, None, "d")  # type: ignore[arg-type]
    with torch.no_grad():
        found, right = adapter.encode([spec]), adapter.encode([spec], ordinary=True)
    assert found is not None and right is not None
    assert found.embeds.shape == right.embeds.shape == (pixels.shape[0] // 4, adapter.shape.hidden_size)
    pairs = zip((found.embeds, *found.deepstack), (right.embeds, *right.deepstack), strict=True)
    assert max(apart(one, other) for one, other in pairs) < 1e-5


@pytest.mark.parametrize(
    "proj", [nn.Conv3d(3, 32, (2, 14, 14), (2, 7, 7)), nn.Conv3d(3, 32, 2, 2, padding=1), nn.Linear(1176, 32)]
)
def test_another_embedding_of_patches_is_refused(proj: nn.Module) -> None:
    visual = visual_of("qwen2_5_vl", torch.float32)
    visual.patch_embed.proj = proj
    with pytest.raises(ModelError, match="needed a Conv3d"):
        VisionTower(visual)


def test_windows_and_learned_positions_together_are_refused() -> None:
    with pytest.raises(ValueError, match="windows and learned positions"):
        TowerShape(2, 14, window=112, learned=LEARNED)


def members(runs: Runs, rows: int) -> list[frozenset[int]]:
    order = np.arange(rows) if runs.order is None else runs.order
    found, start = [], 0
    for count, length in runs.groups:
        for _ in range(count):
            found.append(frozenset(order[start : start + length].tolist()))
            start += length
    assert start == rows
    return found


def tokens_of(layout: VisionLayout, rows: int) -> list[int]:
    """Which patch, in the order of the grids, each row is."""
    tokens = np.arange(rows // 4) if layout.tokens is None else layout.tokens
    return [int(patch) for token in tokens for patch in range(4 * token, 4 * token + 4)]


@settings(max_examples=60, deadline=None)
@given(GRIDS)
def test_layout_has_the_windows_frames_and_positions_of_transformers(grids: list[PatchGrid]) -> None:
    layout, grid_thw = vision_layout(grids, WINDOWED), torch.tensor(grids)
    rows = int(grid_thw.prod(-1).sum())
    patches = tokens_of(layout, rows)
    assert sorted(patches) == list(range(rows))
    index, ends = get_vision_window_index(grid_thw, 2, 112, 14)
    theirs = [int(patch) for token in index for patch in range(4 * token, 4 * token + 4)]
    windows = {frozenset(theirs[a:b]) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)}
    assert layout.windows is not None and layout.windows.order is None
    assert {frozenset(patches[row] for row in run) for run in members(layout.windows, rows)} == windows
    frames = get_vision_cu_seqlens(grid_thw).tolist()
    right = {frozenset(range(a, b)) for a, b in zip(frames[:-1], frames[1:], strict=True)}
    assert {frozenset(patches[row] for row in run) for run in members(layout.frames, rows)} == right
    assert np.array_equal(layout.positions, get_vision_position_ids(grid_thw, 2).numpy()[patches])
    lengths = [length for _, length in layout.windows.groups]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize("grid", [(1, 16, 16), (1, 20, 12), (1, 2, 2)])
def test_rows_of_one_frame_are_not_gathered(grid: PatchGrid) -> None:
    layout = vision_layout([grid], WINDOWED)
    assert layout.frames.order is None and layout.windows is not None and layout.windows.order is None


@settings(max_examples=30, deadline=None)
@given(GRIDS)
def test_without_windows_the_order_stays(grids: list[PatchGrid]) -> None:
    layout = vision_layout(grids, TowerShape(merge=2, patch=16, learned=LEARNED))
    rows = sum(frames * height * width for frames, height, width in grids)
    assert layout.windows is None and layout.tokens is None
    assert layout.learned is not None
    assert layout.learned.taps.shape == layout.learned.weights.shape == (rows, 4)
    assert layout.learned.weights.sum(-1) == pytest.approx(np.ones(rows), abs=1e-6)
    frames = get_vision_cu_seqlens(torch.tensor(grids)).tolist()
    right = {frozenset(range(a, b)) for a, b in zip(frames[:-1], frames[1:], strict=True)}
    assert set(members(layout.frames, rows)) == right


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_plan_made_in_inference_mode_serves_a_later_backward_and_gives_the_same_bits(family: str) -> None:
    visual, grids = visual_of(family, torch.float32), MIXES["unequal"]
    pixels, tower = pixels_of(visual, grids, torch.float32), VisionTower(visual)
    with torch.inference_mode():
        first = tower(pixels, grids)
    held = list(tower.kept_tensors())
    parts, found = with_gradients(visual, lambda: tower(pixels, grids))
    assert held and all(one is other for one, other in zip(held, tower.kept_tensors(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, parts, strict=True))
    fresh, right = with_gradients(visual, lambda: VisionTower(visual)(pixels, grids))
    assert all(torch.equal(one, other) for one, other in zip(fresh, parts, strict=True))
    assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


def test_few_plans_are_kept_and_none_of_many_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    visual = visual_of("qwen2_5_vl", torch.float32)
    tower = VisionTower(visual)

    def bytes_after(grids: list[PatchGrid]) -> int:
        with torch.no_grad():
            tower(pixels_of(visual, grids, torch.float32), grids)
        return sum(tensor.nbytes for tensor in tower.kept_tensors())

    monkeypatch.setattr("rollplex.models.tower._PLANS_KEPT", 2)
    one = bytes_after([(1, 4, 4)])
    assert bytes_after([(1, 4, 4)]) == one < bytes_after([(1, 4, 6)])
    two = bytes_after([(1, 4, 8)])
    assert bytes_after([(1, 4, 8)]) == two  # (1, 4, 4) has gone
    monkeypatch.setattr("rollplex.models.tower._PATCHES_KEPT", 63)
    assert bytes_after([(1, 8, 8)]) == two
