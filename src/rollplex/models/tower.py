"""The vision towers of both families, run with few calls: transformers' modules in a forward of our own.

transformers' forward makes more calls for a few small pictures than the decoder does for their whole prompt: it works
out positions and windows (vision_layout.py), norms and rotates in many small operations, and attends window by window.
Calls cost time by themselves, and more beside decoding (docs/lab-notes.md). Here windows of one length attend in one
call, queries and keys are rotated together, and patches, which do not overlap, are embedded by a product of matrices
instead of a convolution. Modules stay transformers' own, so LoRA on them works unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from rollplex.models.norms import rms_norm
from rollplex.models.rotary import rotate, signed
from rollplex.models.vision_layout import PatchGrid, Runs, TowerShape, vision_layout


class VisionTower:
    """Runs `visual`, the tower of a Qwen2.5-VL or Qwen3-VL model; holds nothing of its own."""

    def __init__(self, visual: Any):
        config = visual.config
        self._visual = visual
        learned = hasattr(visual, "pos_embed")
        self._shape = TowerShape(
            merge=visual.spatial_merge_size,
            patch=visual.patch_size,
            window=None if learned else visual.window_size,
            learned_side=visual.num_grid_per_side if learned else None,
        )
        self._heads: int = config.num_heads
        # Blocks that attend within whole frames though there are windows.
        self._full: frozenset[int] = frozenset(() if learned else visual.fullatt_block_indexes)
        self._deepstack = {level: n for n, level in enumerate(getattr(visual, "deepstack_visual_indexes", ()))}

    def __call__(self, pixels_NP: torch.Tensor, grids: Sequence[PatchGrid]) -> tuple[torch.Tensor, ...]:
        """Merged tokens (N / merge^2, width of the decoder), then those of each deepstack level, in the order of
        `grids`. pixels_NP: the patches of all grids, in the weights' dtype, on their device."""
        visual, layout = self._visual, vision_layout(grids, self._shape)
        x_NC = self._embed(pixels_NP)
        if layout.taps is not None and layout.weights is not None:
            taps, weights = self._on(layout.taps, x_NC), self._on(layout.weights, x_NC)
            x_NC = x_NC + (visual.pos_embed(taps) * weights[:, :, None]).sum(1).to(x_NC.dtype)
        if layout.tokens is not None:
            tokens = self._on(layout.tokens, x_NC)
            x_NC = x_NC.view(len(tokens), -1).index_select(0, tokens).view(x_NC.shape)
        frames = _Attention(layout.frames, self._heads, x_NC.device)
        windows = None if layout.windows is None else _Attention(layout.windows, self._heads, x_NC.device)
        cos_ND, sin_ND = visual.rotary_pos_emb(x_NC, self._on(layout.positions, x_NC))
        tables = _Tables(cos_ND, sin_ND, x_NC.dtype)
        levels: list[torch.Tensor] = []
        for number, block in enumerate(visual.blocks):
            attend = frames if windows is None or number in self._full else windows
            x_NC = x_NC + attend(block.attn, _norm(block.norm1, x_NC), tables)
            x_NC = x_NC + block.mlp(_norm(block.norm2, x_NC))
            if number in self._deepstack:
                levels.append(visual.deepstack_merger_list[self._deepstack[number]](x_NC))
        parts = (visual.merger(x_NC), *levels)
        if layout.tokens is None:
            return parts
        back = self._on(np.argsort(layout.tokens), x_NC)
        return tuple(part.index_select(0, back) for part in parts)

    def _embed(self, pixels_NP: torch.Tensor) -> torch.Tensor:
        projection = self._visual.patch_embed.proj
        if type(projection) is not nn.Conv3d:  # an adapter
            return self._visual.patch_embed(pixels_NP)
        return F.linear(pixels_NP, projection.weight.flatten(1), projection.bias)

    @staticmethod
    def _on(array: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).to(like.device)


class _Tables:
    """Rotary tables of a call as rotation in its dtype needs them."""

    def __init__(self, cos_ND: torch.Tensor, sin_ND: torch.Tensor, dtype: torch.dtype):
        self.cos_ND, self.sin_ND = cos_ND, sin_ND
        # transformers rotates in float32 whatever the dtype, unless precision.full_float64 lifts that
        self.lean = None if dtype is torch.float64 else (cos_ND.unsqueeze(1), signed(sin_ND).unsqueeze(1))

    def rotate(self, module: nn.Module, qk_NHD: torch.Tensor) -> torch.Tensor:
        """Queries and keys, (N, 2 heads, D), of attention `module`."""
        if self.lean is None:
            both = sys.modules[type(module).__module__].apply_rotary_pos_emb_vision
            return torch.cat(both(*qk_NHD.chunk(2, 1), self.cos_ND, self.sin_ND), 1)
        return rotate(qk_NHD.float(), *self.lean).to(qk_NHD.dtype)


class _Attention:
    """Attention within runs of rows."""

    def __init__(self, runs: Runs, heads: int, device: torch.device):
        self._groups, self._heads = runs.groups, heads
        self._order = self._back = None
        if runs.order is not None:
            self._order = torch.from_numpy(runs.order).to(device)
            self._back = torch.from_numpy(np.argsort(runs.order)).to(device)

    def __call__(self, module: Any, h_NC: torch.Tensor, tables: _Tables) -> torch.Tensor:
        """What a block's attention `module` gives for its normed input."""
        heads = self._heads
        qkv_NHD = module.qkv(h_NC).view(h_NC.shape[0], 3 * heads, -1)
        qk_NHD, v_NHD = tables.rotate(module, qkv_NHD[:, : 2 * heads]), qkv_NHD[:, 2 * heads :]
        if self._order is not None:
            qk_NHD, v_NHD = qk_NHD.index_select(0, self._order), v_NHD.index_select(0, self._order)
        q_NHD, k_NHD = qk_NHD[:, :heads], qk_NHD[:, heads:]
        rows = [count * length for count, length in self._groups]
        parts = []
        for (count, length), *qkv in zip(self._groups, *(x.split(rows) for x in (q_NHD, k_NHD, v_NHD)), strict=True):
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            parts.append(F.scaled_dot_product_attention(q, k, v, scale=module.scaling).transpose(1, 2).flatten(0, 1))
        out_NHD = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._back is not None:
            out_NHD = out_NHD.index_select(0, self._back)
        return module.proj(out_NHD.flatten(1))


def _norm(norm: Any, x_NC: torch.Tensor) -> torch.Tensor:
    """Qwen2.5-VL's blocks have RMSNorms, Qwen3-VL's LayerNorms."""
    return norm(x_NC) if isinstance(norm, nn.LayerNorm) else rms_norm(norm, x_NC)
