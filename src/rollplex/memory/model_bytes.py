"""What one model holds, in parameters and in bytes per token, counted from its sizes.

Letters: H hidden size, A = heads x head_dim, K = KV heads x head_dim, I MLP width, L layers, V vocabulary, e bytes per
number, w bytes per number in which norms compute (4, or 8 in fp64), t tensor-parallel degree. Attention saves q, k, v,
its output and one fp32 log-sum-exp per head. Two kinds of kernels:
- fused (Megatron, vLLM): a norm saves its input and output; SwiGLU gate, up and their product; grouped KV heads are
  read unrepeated.
- eager (transformers' modules, which this package runs): RMSNorm also saves its input in w bytes and the normed values,
  SwiGLU the activated gate, and the causal attention of a prefix reads each KV head once per query head (but without a
  graph on a CPU: there the plan is too high).
With sequence parallelism what lies between two norms is sharded by t too, and gathered where the backward needs it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Literal

from rollplex.models.shapes import ModelShape
from rollplex.models.shard_plan import Kind, shard_plan

_ROTATED_BYTES = 4  # the tower rotates in float32
_LSE_BYTES = 4  # fp32, whatever the weights' dtype


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters on one tensor-parallel rank: matrices by shard, norms and the vision tower whole."""

    text: int
    vision: int
    qkv: int  # of `text`: q, k and v of all layers with their biases

    @property
    def total(self) -> int:
        """All of them."""
        return self.text + self.vision


@cache
def rank_parameters(shape: ModelShape, degree: int) -> RankParameters:
    """What one of `degree` ranks holds, parameter by parameter (models/shard_plan.py); vocabulary padding left out.

    Where there are fewer KV heads than ranks, each rank holds one whole head.
    """
    sums: Counter[Kind] = Counter()
    for tensor in shard_plan(shape).tensors:
        whole = tensor.kind in (Kind.REPLICATED, Kind.VISION)
        parts = 1 if whole else min(degree, tensor.heads) if tensor.kind is Kind.HEADS else degree
        sums[tensor.kind] += ceil(tensor.numel / parts)
    return RankParameters(sums.total() - sums[Kind.VISION], sums[Kind.VISION], sums[Kind.HEADS])


def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int, degree: int) -> int:
    """Keys and values of all layers on one rank: 2 L K e / t; a rank has at least one whole KV head."""
    text = shape.text
    return 2 * text.num_layers * ceil(text.num_kv_heads / degree) * text.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on one rank that a pass of `shape` saves for its backward, at tensor-parallel degree `degree`."""

    shape: ModelShape
    dtype_bytes: int
    degree: int
    sequence_parallel: bool
    kernels: Literal["eager", "fused"] = "fused"

    @property
    def _eager(self) -> bool:
        return self.kernels == "eager"

    def _sequence(self, numbers: float) -> float:
        """Bytes of numbers between two norms: each rank has all of them, or its share of the sequence."""
        return numbers * self.dtype_bytes / (self.degree if self.sequence_parallel else 1)

    @property
    def _wide(self) -> int:
        return max(4, self.dtype_bytes)

    @property
    def _norm(self) -> float:
        """Numbers of e bytes per element of an RMSNorm: input and output; eager: input in w bytes, normed, output."""
        return self._wide / self.dtype_bytes + 2 if self._eager else 2

    @property
    def _head_norms(self) -> float:
        """Bytes of a token for Qwen3's eager norms of q and k in one layer; their output is rotated, not saved."""
        if not self._eager or self.shape.family != "qwen3_vl":
            return 0.0
        text = self.shape.text
        heads = (text.num_heads + text.num_kv_heads) / self.degree
        return heads * ((self._norm - 1) * text.head_dim * self.dtype_bytes + self._wide)

    def layer_input(self, tokens: int) -> int:
        """The input of one decoder layer: H e, sharded with sequence parallelism."""
        return ceil(tokens * self._sequence(self.shape.text.hidden_size))

    def final(self, tokens: int) -> int:
        """The final norm of a response pass."""
        return ceil(tokens * self._sequence(self._norm * self.shape.text.hidden_size))

    def layer(self, tokens: int, *, prefix: bool = False) -> int:
        """One whole decoder layer: its two norms; q, k, v and the attention's output 2A + 2K (eager prefix: 4A), the
        MLP's 3I (eager: 4I), all /t; an fp32 log-sum-exp per head. Eager also w bytes per norm, and Qwen3's norms of
        q and k."""
        text, width = self.shape.text, _width(self.shape)
        kv = kv_bytes_per_token(self.shape, self.dtype_bytes, self.degree) / text.num_layers
        attention = 2 * width * self.dtype_bytes / self.degree + kv
        norms = self._sequence(2 * self._norm * text.hidden_size)
        if self._eager:
            norms += 2 * self._wide
            if prefix:
                attention = 4 * width * self.dtype_bytes / self.degree
            attention += self._head_norms
        mlp = (4 if self._eager else 3) * text.intermediate_size * self.dtype_bytes / self.degree
        return ceil(tokens * (norms + attention + mlp + _LSE_BYTES * text.num_heads / self.degree))

    def working(self, tokens: int, chunk_tokens: int | None = None) -> int:
        """What one layer needs at once beside what is saved: fused, a layer run again; eager, the MLP's 3I and the
        residual's 2H of a pass without a graph, about the gradients of the same of one with.

        In chunks of rows (models/row_chunks.py; eager) the more of two moments: attention, with the layer's input, q,
        keys and values once per query head, and its output in parts and whole, H + 5A; and the MLP of one chunk beside
        input and output of the layer, q and the attention's output, 2H + 2A.
        """
        if not self._eager:
            return self.layer(tokens)
        text = self.shape.text
        width, hidden = _width(self.shape) / self.degree, text.hidden_size
        mlp = 3 * text.intermediate_size / self.degree + 2 * hidden
        numbers = tokens * mlp
        if chunk_tokens is not None and chunk_tokens < tokens:
            chunk = ceil(tokens / ceil(tokens / chunk_tokens))
            chunked = max(tokens * (hidden + 5 * width), tokens * 2 * (hidden + width) + chunk * mlp)
            numbers = min(numbers, chunked)
        return ceil(numbers * self.dtype_bytes)

    def working_tower(self, visual_tokens: int) -> int:
        """What one block of the vision tower needs at once in a pass that saves nothing; eager: q, k and v, beside them
        q and k rolled and rotated (in float32, so that 16 bits need three times 4H), or the MLP; and the pack's
        pixels."""
        vision = self.shape.vision
        if not self._eager:
            return self.vision(visual_tokens) // vision.depth
        patches = visual_tokens * vision.spatial_merge_size**2
        rotating = 3 + (4 if self.dtype_bytes >= _ROTATED_BYTES else 12)
        numbers = 2 * vision.hidden_size + max(rotating * vision.hidden_size, 3 * vision.intermediate_size)
        return patches * (numbers + self._pixels) * self.dtype_bytes

    @property
    def _pixels(self) -> int:
        """Numbers of a patch."""
        vision = self.shape.vision
        return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def decoder(self, tokens: int, *, prefix: bool) -> int:
        """All decoder layers. On a prefix the last one stops at its keys and values (models/prefix.py): it saves its
        norms and, fused, q; keys and values are counted too, except eager ones, which live on as the boundary alone."""
        text = self.shape.text
        rotary = tokens * text.head_dim * self.dtype_bytes if self._eager else 0  # sines and cosines, once for all
        if not prefix:
            return text.num_layers * self.layer(tokens) + rotary
        last = self._sequence(self._norm * text.hidden_size) + self._head_norms
        if not self._eager:
            kv = kv_bytes_per_token(self.shape, self.dtype_bytes, self.degree) / text.num_layers
            last += _width(self.shape) * self.dtype_bytes / self.degree + kv
        return (text.num_layers - 1) * self.layer(tokens, prefix=True) + ceil(tokens * last) + rotary

    def vision(self, visual_tokens: int) -> int:
        """The vision tower and its mergers. Each rank holds the tower whole and encodes its share of the frames, or
        eager all of them.

        A token is m^2 patches; a block saves for each what a decoder layer does, with A = K = H and an MLP of three
        matrices, or two (Qwen3, whose norms are LayerNorms: input and output); the merger saves its normed input and
        its activation's input and output. Eager: q, k and v stay as one projection beside the rotated q and k
        (6H; 7H where there are windows, which most grids cut to several lengths, whose results are joined), the pixels
        of a pack are copied, each merger saves its norm as well, whose input is the next block's where there is one.
        """
        vision, qwen3 = self.shape.vision, self.shape.family == "qwen3_vl"
        patches = (visual_tokens if self._eager else ceil(visual_tokens / self.degree)) * vision.spatial_merge_size**2
        if not self._eager:
            mlp = (2 if qwen3 else 3) * vision.intermediate_size
            block = (8 * vision.hidden_size + mlp) * self.dtype_bytes + _LSE_BYTES * vision.num_heads
            return patches * (vision.depth * block + 3 * vision.hidden_size * self.dtype_bytes)
        norm = 2 if qwen3 else self._norm
        mlp = (2 if qwen3 else 4) * vision.intermediate_size
        attention = 7 if vision.window_size else 6
        numbers = vision.depth * ((2 * norm + attention) * vision.hidden_size + mlp)
        numbers += (norm + 2 + len(vision.deepstack_layers) * (norm + 1)) * vision.hidden_size
        numbers += self._pixels
        statistics = vision.depth * (_LSE_BYTES * vision.num_heads + (4 if qwen3 else 2) * self._wide)
        rotary = 2 * 4 * vision.hidden_size // vision.num_heads
        return ceil(patches * (numbers * self.dtype_bytes + statistics + rotary))


def decoder_parameters(shape: ModelShape, degree: int) -> int:
    """All decoder layers on one rank, and the final norm: the language model without embedding and head."""
    rows = shape.text.vocab_size * shape.text.hidden_size * (1 if shape.tied else 2)
    return rank_parameters(shape, degree).text - ceil(rows / degree)


def prefix_flops(shape: ModelShape, prompt_tokens: int, visual_tokens: int) -> float:
    """Operations of one forward of one prompt: 2 per parameter and token (the embedding is a look-up, the head does not
    run), 2 A P^2 per layer for causal attention, and the tower's 2 per parameter and patch. The tower's attention, most
    of it in windows, is left out."""
    text, vision = shape.text, shape.vision
    vision_parameters = rank_parameters(shape, 1).vision
    attention = 2.0 * _width(shape) * prompt_tokens**2 * text.num_layers
    patches = visual_tokens * vision.spatial_merge_size**2
    decoder = 2.0 * decoder_parameters(shape, 1) * prompt_tokens
    return decoder + attention + 2.0 * vision_parameters * patches


def _width(shape: ModelShape) -> int:
    return shape.text.num_heads * shape.text.head_dim
