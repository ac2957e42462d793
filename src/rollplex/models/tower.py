"""The vision towers of both families, run with few calls: transformers' modules in a forward of our own.

transformers' forward makes more calls for a few small pictures than the decoder does for their whole prompt: it works
out positions and windows anew (vision_layout.py), norms and rotates in many small operations, and attends window by
window. Calls cost time by themselves, and more beside other threads (norms.py). Here windows of one length attend in
one call, queries and keys are rotated together, and patches, which do not overlap, are embedded by a product of
matrices instead of a convolution. Modules stay transformers' own, so LoRA on them works unchanged, and the ordinary
path (`QwenDecoder.encode`) still runs transformers' forward, which `rollplex verify` holds this one against.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rollplex.errors import ModelError
from rollplex.models.attention import by_run
from rollplex.models.norms import rms_norm
from rollplex.models.precision import is_lifted
from rollplex.models.projections import added, linear, mlp
from rollplex.models.rotary import rotate, signed
from rollplex.models.vision_layout import Index, LearnedGrid, Runs, TowerShape, vision_layout
from rollplex.types import PatchGrid

_PLANS_KEPT, _PATCHES_KEPT = 8, 2048  # 11 MB at most for heads of 80


class VisionTower:
    """Runs `visual`, the tower of a Qwen2.5-VL or Qwen3-VL model; has no weights of its own.

    Raises ModelError where patches are not embedded each by itself.
    """

    def __init__(self, visual: Any):
        projection, side = visual.patch_embed.proj, getattr(visual, "num_grid_per_side", None)
        apart = type(projection) is nn.Conv3d and projection.kernel_size == projection.stride
        if not apart or (projection.padding, projection.dilation, projection.groups) != ((0,) * 3, (1,) * 3, 1):
            raise ModelError(
                f"the vision tower embeds patches with {projection}, needed a Conv3d whose stride is its kernel, "
                "without padding, dilation or groups: this tower needs an adapter of its own (docs/add-a-model.md)"
            )
        self._visual = visual
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # passes run in several threads
        self._shape = TowerShape(
            merge=visual.spatial_merge_size,
            patch=visual.patch_size,
            window=getattr(visual, "window_size", None),
            learned=None
            if side is None
            else LearnedGrid(side, visual.interpolation_mode, visual.interpolation_align_corners),
        )
        self._full = frozenset(getattr(visual, "fullatt_block_indexes", ()))  # within frames though there are windows
        self._deepstack = {block: level for level, block in enumerate(getattr(visual, "deepstack_visual_indexes", ()))}

    def __call__(self, pixels_NP: torch.Tensor, grids: Sequence[PatchGrid]) -> tuple[torch.Tensor, ...]:
        """Merged tokens (N / merge^2, width of the decoder), then those of each deepstack level, in the order of
        `grids`. pixels_NP: the patches of all grids, in the weights' dtype, on their device."""
        visual = self._visual
        # All indices before the first product: a copy from the host waits for what was queued before it.
        plan = self._planned(pixels_NP, tuple(grids))
        tokens = plan.tokens
        if plan.learned is not None:
            taps, weights = plan.learned
            positions_NC = (visual.pos_embed(taps) * weights[:, :, None]).sum(1)

        projection = visual.patch_embed.proj
        x_NC = F.linear(pixels_NP, projection.weight.flatten(1), projection.bias)
        if plan.learned is not None:
            x_NC = x_NC + positions_NC.to(x_NC.dtype)
        if tokens is not None:
            x_NC = x_NC.view(len(tokens), -1).index_select(0, tokens).view(x_NC.shape)
        levels: list[torch.Tensor] = []
        for number, block in enumerate(visual.blocks):
            attention = plan.frames if plan.windows is None or number in self._full else plan.windows
            x_NC = added(x_NC, _attend(block.attn, _norm(block.norm1, x_NC), plan.rotation, attention))
            x_NC = added(x_NC, mlp(block.mlp, _norm(block.norm2, x_NC)))
            if number in self._deepstack:
                levels.append(visual.deepstack_merger_list[self._deepstack[number]](x_NC))
        parts = (_merged(visual.merger, x_NC), *levels)
        return parts if plan.tokens_back is None else tuple(part.index_select(0, plan.tokens_back) for part in parts)

    def kept_tensors(self) -> Iterator[torch.Tensor]:
        """What stays from pass to pass."""
        with self._lock:
            plans = list(self._plans.values())
        for plan in plans:
            yield from plan.rotation.tables
            yield from (t for t in (plan.tokens, plan.tokens_back, *(plan.learned or ())) if t is not None)
            for attention in (plan.frames, plan.windows):
                yield from () if attention is None else attention.indices

    def _planned(self, pixels_NP: torch.Tensor, grids: tuple[PatchGrid, ...]) -> _Plan:
        """Kept for few patches, whose tables are small and cost as many calls as a block and a half. No two lanes of a
        GPU run one tower at a time (schedule/turn.py): nobody reads a plan whose stream has not made it yet."""
        key = (grids, pixels_NP.device, pixels_NP.dtype, is_lifted())
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        with torch.inference_mode(False), torch.no_grad():  # whoever came first: another's backward may save them
            plan = self._plan(pixels_NP, grids)
        if pixels_NP.shape[0] <= _PATCHES_KEPT:
            with self._lock:
                self._plans[key] = plan
                while len(self._plans) > _PLANS_KEPT:
                    self._plans.popitem(last=False)
        return plan

    def _plan(self, pixels_NP: torch.Tensor, grids: Sequence[PatchGrid]) -> _Plan:
        layout, device = vision_layout(grids, self._shape), pixels_NP.device
        cos_ND, sin_ND = self._visual.rotary_pos_emb(pixels_NP, torch.from_numpy(layout.positions).to(device))
        learned = layout.learned
        return _Plan(
            _Attention(layout.frames, device),
            None if layout.windows is None else _Attention(layout.windows, device),
            *_there_and_back(layout.tokens, device),
            _Rotation(cos_ND.unsqueeze(1), sin_ND.unsqueeze(1), pixels_NP.dtype),
            None
            if learned is None
            else (torch.from_numpy(learned.taps).to(device), torch.from_numpy(learned.weights).to(device)),
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a pass over some grids needs beside pixels and weights, on their device."""

    frames: _Attention
    windows: _Attention | None
    tokens: torch.Tensor | None
    tokens_back: torch.Tensor | None
    rotation: _Rotation
    learned: tuple[torch.Tensor, torch.Tensor] | None  # taps and weights


class _Rotation:
    """Rotary embedding in float32 whatever the dtype, as transformers', but for float64 where that cast is lifted."""

    def __init__(self, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor, dtype: torch.dtype):
        self._inner, self._outer = torch.float64 if dtype is torch.float64 and is_lifted() else torch.float32, dtype
        self.tables = cos_N1D.to(self._inner), signed(sin_N1D.to(self._inner))

    def __call__(self, x_NHD: torch.Tensor) -> torch.Tensor:
        if self._inner is self._outer:  # a call that changes nothing is a call all the same
            return rotate(x_NHD, *self.tables)
        return rotate(x_NHD.to(self._inner), *self.tables).to(self._outer)


class _Attention:
    """Attention within runs of rows, a call for each length."""

    def __init__(self, runs: Runs, device: torch.device):
        self._groups = runs.groups
        self._order, self._back = _there_and_back(runs.order, device)

    @property
    def indices(self) -> list[torch.Tensor]:
        """What it holds."""
        return [index for index in (self._order, self._back) if index is not None]

    def ordered(self, x_NHD: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the runs."""
        return x_NHD if self._order is None else x_NHD.index_select(0, self._order)

    def _runs(self, *tensors: torch.Tensor) -> Iterator[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]:
        """Each length's runs: count and length, and their rows of both tensors."""
        if len(self._groups) == 1:
            return zip(self._groups, *((tensor,) for tensor in tensors), strict=True)
        rows = [count * length for count, length in self._groups]
        return zip(self._groups, *(tensor.split(rows) for tensor in tensors), strict=True)

    def __call__(self, qk_NHD: torch.Tensor, v_NHD: torch.Tensor, scale: float) -> torch.Tensor:
        """Of ordered rows; qk_NHD: queries of all heads, then keys. Returns (N, heads * D) in the blocks' order."""
        parts = []
        for (count, length), qk, values in self._runs(qk_NHD, v_NHD):
            q, k = by_run(qk, count, length).chunk(2, 1)
            v = by_run(values, count, length)
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
            parts.append(out.transpose(1, 2).reshape(count * length, -1))
        out_NA = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_NA if self._back is None else out_NA.index_select(0, self._back)


def _attend(module: Any, h_NC: torch.Tensor, rotation: _Rotation, attention: _Attention) -> torch.Tensor:
    """What a block's attention `module` gives for its normed input."""
    heads = module.num_heads
    qkv_NHD = linear(module.qkv, h_NC).view(h_NC.shape[0], 3 * heads, -1)
    qk_NHD, v_NHD = rotation(qkv_NHD[:, : 2 * heads]), qkv_NHD[:, 2 * heads :]
    del qkv_NHD  # one by one: a pass without a graph then holds seven times its rows at most (memory/model_bytes.py)
    qk_NHD = attention.ordered(qk_NHD)
    v_NHD = attention.ordered(v_NHD)
    return linear(module.proj, attention(qk_NHD, v_NHD, module.scaling))


def _merged(merger: Any, x_NC: torch.Tensor) -> torch.Tensor:
    """merger(x_NC); Qwen2.5-VL's norm in one call."""
    if not hasattr(merger, "ln_q"):
        return merger(x_NC)
    return merger.mlp(_norm(merger.ln_q, x_NC).view(-1, merger.hidden_size))


def _norm(norm: Any, x_NC: torch.Tensor) -> torch.Tensor:
    """Qwen2.5-VL's blocks have RMSNorms, Qwen3-VL's LayerNorms."""
    return norm(x_NC) if isinstance(norm, nn.LayerNorm) else rms_norm(norm, x_NC)


def _there_and_back(order: Index | None, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """An order on the device, and its inverse."""
    if order is None:
        return None, None
    return torch.from_numpy(order).to(device), torch.from_numpy(np.argsort(order)).to(device)
