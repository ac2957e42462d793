"""How each parameter of a model divides among tensor-parallel ranks: names, full shapes and kinds. Imports no torch.

Names are those of transformers (`named_parameters` of the family's ForConditionalGeneration class); a tied output head
is not listed, since it is the embedding. tests/unit/test_shard_plan.py compares the list with the real models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from rollplex.models.shapes import ModelShape, TextShape, VisionShape


class Kind(StrEnum):
    """Along what a tensor is divided."""

    COLUMN = "column-parallel"  # output rows: weight (out, in) or bias (out)
    ROW = "row-parallel"  # input columns of a weight (out, in)
    VOCAB = "vocab-parallel"  # rows, one per token id
    HEADS = "head-parallel"  # output rows in whole query or key/value heads
    REPLICATED = "replicated"  # whole on every rank
    VISION = "vision"  # vision tower and mergers: whole on every rank


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """One parameter. `heads` is the number of heads along the rows of a HEADS tensor, else 0.

    `fused` names what engines that multiply several matrices at once make of it, with its members' rows one after the
    other: "qkv_proj" (q, k, v) or "gate_up_proj" (gate, up); "" for a tensor that is never fused.
    Example: PlanTensor("...layers.0.self_attn.k_proj.weight", (1024, 5120), Kind.HEADS, 8, "...qkv_proj.weight")
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    heads: int = 0
    fused: str = ""

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All parameters in the order of the model, members of a fused matrix next to each other."""

    shape: ModelShape
    tensors: tuple[PlanTensor, ...]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; above this degree of tensor parallelism each head is held by several ranks."""
        return self.shape.text.num_kv_heads


def shard_plan(shape: ModelShape) -> ShardPlan:
    """The parameters of the family's model in transformers, by name."""
    tensors = [*_vision_tensors(shape), *_text_tensors(shape)]
    if not shape.tied:
        tensors.append(PlanTensor("lm_head.weight", (shape.text.vocab_size, shape.text.hidden_size), Kind.VOCAB))
    return ShardPlan(shape, tuple(tensors))


def _text_tensors(shape: ModelShape) -> Iterator[PlanTensor]:
    text, root = shape.text, "model.language_model."
    yield PlanTensor(f"{root}embed_tokens.weight", (text.vocab_size, text.hidden_size), Kind.VOCAB)
    for index in range(text.num_layers):
        yield from _decoder_layer(text, shape.family, f"{root}layers.{index}.")
    yield PlanTensor(f"{root}norm.weight", (text.hidden_size,), Kind.REPLICATED)


def _decoder_layer(text: TextShape, family: str, root: str) -> Iterator[PlanTensor]:
    width, attention, mlp = text.hidden_size, f"{root}self_attn.", f"{root}mlp."
    heads = {"q": text.num_heads, "k": text.num_kv_heads, "v": text.num_kv_heads}
    for part, columns in (("weight", (width,)), ("bias", ())):
        if part == "bias" and family != "qwen2_5_vl":
            continue
        for letter, count in heads.items():
            shape = (count * text.head_dim, *columns)
            yield PlanTensor(
                f"{attention}{letter}_proj.{part}", shape, Kind.HEADS, count, f"{attention}qkv_proj.{part}"
            )
    yield PlanTensor(f"{attention}o_proj.weight", (width, text.num_heads * text.head_dim), Kind.ROW)
    if family == "qwen3_vl":
        for letter in ("q", "k"):
            yield PlanTensor(f"{attention}{letter}_norm.weight", (text.head_dim,), Kind.REPLICATED)
    for name in ("gate", "up"):
        shape = (text.intermediate_size, width)
        yield PlanTensor(f"{mlp}{name}_proj.weight", shape, Kind.COLUMN, fused=f"{mlp}gate_up_proj.weight")
    yield PlanTensor(f"{mlp}down_proj.weight", (width, text.intermediate_size), Kind.ROW)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield PlanTensor(f"{root}{name}.weight", (width,), Kind.REPLICATED)


def _vision_tensors(shape: ModelShape) -> Iterator[PlanTensor]:
    family = _qwen2_5_vision if shape.family == "qwen2_5_vl" else _qwen3_vision
    for name, size in family(shape.vision):
        full = f"model.visual.{name}"
        fused = re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", full)
        yield PlanTensor(full, size, Kind.VISION, fused=fused if fused != full else "")


Named = tuple[str, tuple[int, ...]]


def _qwen2_5_vision(vision: VisionShape) -> Iterator[Named]:
    width, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    yield "patch_embed.proj.weight", _patch_kernel(vision)
    for index in range(vision.depth):
        block = f"blocks.{index}."
        yield f"{block}norm1.weight", (width,)
        yield f"{block}norm2.weight", (width,)
        yield from _linear(f"{block}attn.qkv", 3 * width, width)
        yield from _linear(f"{block}attn.proj", width, width)
        yield from ((f"{block}mlp.{name}_proj.weight", (vision.intermediate_size, width)) for name in ("gate", "up"))
        yield from ((f"{block}mlp.{name}_proj.bias", (vision.intermediate_size,)) for name in ("gate", "up"))
        yield from _linear(f"{block}mlp.down_proj", width, vision.intermediate_size)
    yield "merger.ln_q.weight", (width,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", vision.out_hidden_size, merged)


def _qwen3_vision(vision: VisionShape) -> Iterator[Named]:
    width, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    yield "patch_embed.proj.weight", _patch_kernel(vision)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (vision.num_position_embeddings, width)
    for index in range(vision.depth):
        block = f"blocks.{index}."
        yield from _norm(f"{block}norm1", width)
        yield from _norm(f"{block}norm2", width)
        yield from _linear(f"{block}attn.qkv", 3 * width, width)
        yield from _linear(f"{block}attn.proj", width, width)
        yield from _linear(f"{block}mlp.linear_fc1", vision.intermediate_size, width)
        yield from _linear(f"{block}mlp.linear_fc2", width, vision.intermediate_size)
    # The last merger normalises single patches, those of deepstack the merged ones.
    mergers = [
        ("merger", width),
        *((f"deepstack_merger_list.{i}", merged) for i in range(len(vision.deepstack_layers))),
    ]
    for name, normed in mergers:
        yield from _norm(f"{name}.norm", normed)
        yield from _linear(f"{name}.linear_fc1", merged, merged)
        yield from _linear(f"{name}.linear_fc2", vision.out_hidden_size, merged)


def _patch_kernel(vision: VisionShape) -> tuple[int, ...]:
    patch = vision.patch_size
    return (vision.hidden_size, vision.in_channels, vision.temporal_patch_size, patch, patch)


def _linear(name: str, rows: int, columns: int) -> Iterator[Named]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, width: int) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
