"""The decoder layer that the Qwen-VL families share: grouped-query attention with MRoPE and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rollplex.errors import ModelError
from rollplex.models.adapter import DecoderShape, FullBatch, VisionFeatures
from rollplex.models.norms import rms_norm
from rollplex.models.projections import added, linear, mlp
from rollplex.models.ranks import ALONE, TensorRanks, VocabEmbedding, VocabPart
from rollplex.models.rotary import rotate, signed
from rollplex.models.steady import missing_rows
from rollplex.models.tower import VisionTower
from rollplex.types import PatchGrid, PromptSpec


class QwenDecoder:
    """Shared part of the Qwen-VL adapters; a family adds `encode` details and, if it has them, q/k norms."""

    has_qk_norm: bool

    def __init__(self, model: Any, ranks: TensorRanks = ALONE):
        text = model.model.language_model
        config = text.config
        if not isinstance(model.lm_head, nn.Linear) or type(model.lm_head) is not nn.Linear:
            raise ModelError(
                f"lm_head is a {type(model.lm_head).__name__}, needed a plain Linear; leave lm_head out of "
                "model.lora.target_modules"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.text = text
        self.visual = model.model.visual
        self._tower = VisionTower(self.visual)
        self.layers: Sequence[Any] = text.layers
        self.final_norm = text.norm
        self.lm_head = model.lm_head
        self.ranks = ranks
        # out_features stays that of the whole model when a rank's rows take the weight's place
        self.vocab_part = VocabPart.of(ranks, model.lm_head.weight.shape[0], model.lm_head.out_features)
        alone = ranks.size == 1
        self.embed: nn.Module = text.embed_tokens if alone else VocabEmbedding(text.embed_tokens, self.vocab_part)
        self.rotary_module = text.rotary_emb
        self.shape = DecoderShape(
            num_layers=len(text.layers),
            num_heads=config.num_attention_heads // ranks.size,
            num_kv_heads=max(1, config.num_key_value_heads // ranks.size),
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            vocab_size=model.lm_head.out_features,
            scaling=head_dim**-0.5,
        )
        ids = (
            model.config.image_token_id,
            model.config.video_token_id,
            model.config.vision_start_token_id,
            model.config.vision_end_token_id,
        )
        self.vision_token_ids: tuple[int, ...] = tuple(i for i in ids if i is not None)

    def rotary(self, positions_3T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=dtype, device=positions_3T.device)
        cos, sin = self.rotary_module(like, positions_3T.unsqueeze(1))
        return cos[0].unsqueeze(1), signed(sin[0]).unsqueeze(1)

    def qkv(
        self, layer: Any, x_TC: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention, by_head = layer.self_attn, (x_TC.shape[0], -1, self.shape.head_dim)
        h_TC = self.ranks.enter(rms_norm(layer.input_layernorm, x_TC))
        q_THD = linear(attention.q_proj, h_TC).view(by_head)
        k_TKD = linear(attention.k_proj, h_TC).view(by_head)
        v_TKD = linear(attention.v_proj, h_TC).view(by_head)
        if self.has_qk_norm:
            q_THD, k_TKD = rms_norm(attention.q_norm, q_THD), rms_norm(attention.k_norm, k_TKD)
        return rotate(q_THD, cos_T1D, sin_T1D), rotate(k_TKD, cos_T1D, sin_T1D), v_TKD

    def finish(self, layer: Any, x_TC: torch.Tensor, attention_TC: torch.Tensor) -> torch.Tensor:
        x_TC = added(x_TC, self.ranks.leave(linear(layer.self_attn.o_proj, attention_TC)))
        h_TC = self.ranks.enter(rms_norm(layer.post_attention_layernorm, x_TC))
        return added(x_TC, self.ranks.leave(mlp(layer.mlp, h_TC)))

    def kept_tensors(self) -> Iterable[torch.Tensor]:
        return self._tower.kept_tensors()

    def full_hidden(self, batch: FullBatch) -> torch.Tensor:
        if self.ranks.size > 1:
            raise ModelError(
                f"the full-sequence path runs transformers' own decoder, whole in one process, and training has "
                f"{self.ranks.size} tensor-parallel ranks; set train.share_prefix=true, or sharing.train_tp=1"
            )
        embeds_BSC, extra = batch.embeds_BSC, {}
        if batch.vision is not None:
            features = batch.vision.embeds.to(embeds_BSC.dtype)
            embeds_BSC = embeds_BSC.masked_scatter(batch.visual_BS.unsqueeze(-1), features)
            if batch.vision.deepstack:
                extra = {"visual_pos_masks": batch.visual_BS, "deepstack_visual_embeds": list(batch.vision.deepstack)}
        output = self.text(
            inputs_embeds=embeds_BSC,
            position_ids=batch.positions_3BS,
            attention_mask=None if bool(batch.mask_BS.all()) else batch.mask_BS,
            use_cache=False,
            **extra,
        )
        return output.last_hidden_state

    def encode(self, specs: Sequence[PromptSpec], *, ordinary: bool = False) -> VisionFeatures | None:
        """All media of all prompts through the tower in one call, then back into placeholder order."""
        chunks: list[torch.Tensor] = []
        grids: list[list[PatchGrid]] = []
        order: list[tuple[int, int]] = []
        for number, spec in enumerate(specs):
            for pixels, grid, kind in (
                (spec.pixel_values, spec.image_grid_thw, 1),
                (spec.pixel_values_videos, spec.video_grid_thw, 2),
            ):
                if pixels is not None and grid is not None:
                    chunks.append(pixels)
                    grids.append([(frames, rows, columns) for frames, rows, columns in grid.tolist()])
                    order.append((number, kind))
        if not chunks:
            return None
        weight = next(self.visual.parameters())
        pixels = torch.cat(chunks).to(device=weight.device, dtype=weight.dtype)
        parts = self._merged(pixels, [grid for several in grids for grid in several], ordinary)
        merge = self.visual.spatial_merge_size**2
        sizes = [sum(frames * rows * columns for frames, rows, columns in several) // merge for several in grids]
        index = _placeholder_order(specs, order, sizes)
        if index is not None:
            index = index.to(weight.device)
            parts = tuple(part.index_select(0, index) for part in parts)
        return VisionFeatures(embeds=parts[0], deepstack=tuple(parts[1:]))

    def _merged(self, pixels: torch.Tensor, grids: list[PatchGrid], ordinary: bool) -> tuple[torch.Tensor, ...]:
        """Merged tokens, and those of each deepstack level. Where they are so few that their bits would depend on the
        number of threads (steady.py), a blank picture is beside them: pictures do not see each other."""
        side = self.visual.spatial_merge_size
        tokens = pixels.shape[0] // side**2
        blank = missing_rows(tokens, pixels)
        if blank:
            pixels, grids = F.pad(pixels, (0, 0, 0, blank * side**2)), [*grids, (1, side, side * blank)]
        if ordinary:
            output = self.visual(pixels, grid_thw=torch.tensor(grids, device=pixels.device))
            parts = (output.pooler_output, *getattr(output, "deepstack_features", ()))
        else:
            parts = self._tower(pixels, grids)
        return tuple(part[:tokens] for part in parts) if blank else parts


def _placeholder_order(
    specs: Sequence[PromptSpec], order: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> torch.Tensor | None:
    """Row index that brings (images then videos per prompt) into the order of the prompts' placeholders.

    None when they are in that order already, as in every prompt that does not mix images and videos.
    """
    if len({number for number, _ in order}) == len(order):
        return None
    starts: dict[tuple[int, int], int] = {}
    total = 0
    for key, size in zip(order, sizes, strict=True):
        starts[key] = total
        total += size
    pieces = []
    for number, spec in enumerate(specs):
        types = spec.token_types[spec.token_types > 0].long()
        piece = torch.empty_like(types)
        for kind in (1, 2):
            mask = types == kind
            piece[mask] = starts.get((number, kind), 0) + torch.arange(int(mask.sum()))
        pieces.append(piece)
    return torch.cat(pieces)
