"""What one model holds, in parameters and in bytes per token, counted from its sizes.

Letters: H hidden size, A = heads x head_dim, K = KV heads x head_dim, I MLP width, L layers, V vocabulary, e bytes per
number, t tensor-parallel degree. Kernels are taken to be fused: a norm saves its input, attention saves q, k, v, its
output and one fp32 log-sum-exp per head, and reads grouped KV heads unrepeated; SwiGLU saves gate and up. With sequence
parallelism what lies between two norms is sharded by t too, and gathered again where the backward needs it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import ceil

from rollplex.models.shapes import ModelShape
from rollplex.models.shard_plan import Kind, shard_plan

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

    def _sequence(self, numbers: float) -> float:
        """Bytes of numbers between two norms: each rank has all of them, or its share of the sequence."""
        return numbers * self.dtype_bytes / (self.degree if self.sequence_parallel else 1)

    def layer_input(self, tokens: int) -> int:
        """The input of one decoder layer: H e, sharded with sequence parallelism."""
        return ceil(tokens * self._sequence(self.shape.text.hidden_size))

    def layer(self, tokens: int) -> int:
        """One whole decoder layer: inputs and outputs of its two norms 4H; q and the attention's output 2A, k and v 2K,
        gate, up and their product 3I, all /t; and an fp32 log-sum-exp per head."""
        text = self.shape.text
        sharded = 2 * _width(self.shape) + 3 * text.intermediate_size
        return ceil(
            tokens
            * (
                self._sequence(4 * text.hidden_size)
                + sharded * self.dtype_bytes / self.degree
                + kv_bytes_per_token(self.shape, self.dtype_bytes, self.degree) / text.num_layers
                + _LSE_BYTES * text.num_heads / self.degree
            )
        )

    def decoder(self, tokens: int, *, prefix: bool) -> int:
        """All decoder layers. On a prefix the last one stops at its keys and values (models/prefix.py): it saves its
        norm's input and output, q, k and v."""
        if not prefix:
            return self.shape.text.num_layers * self.layer(tokens)
        text = self.shape.text
        last = tokens * (
            self._sequence(2 * text.hidden_size)
            + _width(self.shape) * self.dtype_bytes / self.degree
            + kv_bytes_per_token(self.shape, self.dtype_bytes, self.degree) / text.num_layers
        )
        return (text.num_layers - 1) * self.layer(tokens) + ceil(last)

    def vision(self, visual_tokens: int) -> int:
        """The vision tower and its merger. Each rank holds the tower whole and encodes its share of the frames.

        A token is m^2 patches; a block saves for each what a decoder layer does, with A = K = H and an MLP of three
        matrices, or two (Qwen3); the merger saves its normed input and its activation's input and output.
        """
        vision = self.shape.vision
        mlp = (2 if self.shape.family == "qwen3_vl" else 3) * vision.intermediate_size
        block = (8 * vision.hidden_size + mlp) * self.dtype_bytes + _LSE_BYTES * vision.num_heads
        patches = ceil(visual_tokens / self.degree) * vision.spatial_merge_size**2
        return patches * (vision.depth * block + 3 * vision.hidden_size * self.dtype_bytes)


def prefix_flops(shape: ModelShape, prompt_tokens: int, visual_tokens: int) -> float:
    """Operations of one forward of one prompt: 2 per parameter and token (the embedding is a look-up, the head does not
    run), 2 A P^2 per layer for causal attention, and the tower's 2 per parameter and patch. The tower's attention, most
    of it in windows, is left out."""
    text, vision = shape.text, shape.vision
    parameters = rank_parameters(shape, 1)
    rows = text.vocab_size * text.hidden_size * (1 if shape.tied else 2)
    attention = 2.0 * _width(shape) * prompt_tokens**2 * text.num_layers
    patches = visual_tokens * vision.spatial_merge_size**2
    return 2.0 * (parameters.text - rows) * prompt_tokens + attention + 2.0 * parameters.vision * patches


def _width(shape: ModelShape) -> int:
    return shape.text.num_heads * shape.text.head_dim
