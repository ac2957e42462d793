"""Operations and bytes of every pass of a model, counted from its sizes (docs/cost-model.md has the equations).

tests/numerics/test_flops.py holds the operations against what torch counts while the real models run, within 1 %.

Letters: H hidden size, A = heads x head_dim, K = KV heads x head_dim, I width of an MLP (of one expert), L layers,
V vocabulary, T tokens, e bytes per number. Bytes of activations are those of the elementwise kernels (norms, rotary
embedding, SwiGLU, residual additions: 10 H + 2 A + 2 K + 3 I numbers a token and layer), each reading its inputs and
writing its outputs once; what products and attention read and write hides behind their operations, or behind weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rollplex.memory.model_bytes import rank_parameters
from rollplex.models.shapes import Experts, ModelShape
from rollplex.planner.load import GroupLoad, Prompt, window_sizes
from rollplex.planner.work import NOTHING, Work

Activations = Literal["graph", "checkpoint", "recompute"]


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernels one after another in the parts of a forward pass. backward: of one, for each of its forward."""

    projections: int  # of a layer: norm, q, k and v, rotary embedding
    attention: int
    on_prefix: int  # attention of responses on their prefix
    finish: int  # output, add, norm, MLP, add
    head: int  # norm, product, log-softmax
    block: int  # of the tower, without its attention
    call: int  # of the tower's attention
    backward: float


FUSED = Launches(projections=3, attention=1, on_prefix=1, finish=7, head=3, block=10, call=1, backward=2.0)
# Calls of operators that are no mere view, counted while the passes of this repository ran (Qwen2.5-VL, CPU; see
# docs/cost-model.md). A backward makes 2.2 for each of the forward; without Python between them they count as 1.5.
EAGER = Launches(projections=15, attention=4, on_prefix=25, finish=14, head=20, block=24, call=1, backward=1.5)
# Scores of rollout/two_level.py read or written: product, softmax (both), product; without those of
# suffixes, which are few, and the bias of unequal prompts (both once more).
_SCORE_PASSES = 4
# fp32 passes over the logits of a chunk (models/logprobs.py): written, log-sum-exp, subtracted and exponentiated in
# place, entropy.
_LOGIT_BYTES = 6 * 4


@dataclass(frozen=True)
class ModelCounts:
    """Counts passes of one model, the whole of it on one device; parallel.py divides them.

    `vision_trained` off: the tower has no backward (model.freeze_vision). `eager`: as this repository runs without
    variable-length attention kernels (CPU, or a GPU without them): the tower calls attention once for each length of
    window or frame, and decoding writes its scores out. Whole sequences count as many launches, though transformers'
    own modules, which run there, make more. Sequences are packed; what pads is said.
    """

    shape: ModelShape
    dtype_bytes: int = 2
    experts: Experts | None = None
    vision_trained: bool = True
    eager: bool = False

    # --- parameters

    @cached_property
    def text_parameters(self) -> int:
        """Parameters of the language model and its head: those of models/shard_plan.py, and all experts."""
        dense = rank_parameters(self.shape, 1).text
        if self.experts is None:
            return dense
        text = self.shape.text
        more = (self.experts.count - 1) * self._mlp + self.experts.count * text.hidden_size
        return dense + text.num_layers * more

    @cached_property
    def vision_parameters(self) -> int:
        """Parameters of the tower and its mergers."""
        return rank_parameters(self.shape, 1).vision

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.text_parameters + self.vision_parameters

    @property
    def expert_parameters(self) -> int:
        """Those of `parameters` that expert parallelism divides; 0 for a dense model."""
        return 0 if self.experts is None else self.shape.text.num_layers * self.experts.count * self._mlp

    @property
    def token_expert_bytes(self) -> float:
        """Weights of the experts that one token needs, in all layers; 0 for a dense model."""
        active = 0 if self.experts is None else self.experts.active
        return float(self.shape.text.num_layers * active * self._mlp * self.dtype_bytes)

    @property
    def trained_parameters(self) -> int:
        """Those with gradients and optimizer state."""
        return self.text_parameters + (self.vision_parameters if self.vision_trained else 0)

    @property
    def norm_share(self) -> float:
        """Part of a layer's activation bytes that lies between norms: 10 H of 10 H + 2 A + 2 K + 3 I."""
        text, active = self.shape.text, 1 if self.experts is None else self.experts.active
        between = 10 * text.hidden_size
        inner = 2 * (text.num_heads + text.num_kv_heads) * text.head_dim + 3 * active * text.intermediate_size
        return between / (between + inner)

    # --- passes of the language model

    def decoder(self, tokens: float, pairs: float) -> Work:
        """All layers on `tokens` packed tokens with `pairs` query-key pairs within their masks."""
        return self._layers(tokens, pairs, self._launches.attention)

    def head(self, tokens: float) -> Work:
        """Log-probs of `tokens` rows over the vocabulary, logits in chunks that are not kept."""
        text = self.shape.text
        return Work(
            matmul_flops=2.0 * tokens * text.hidden_size * text.vocab_size,
            weight_bytes=text.hidden_size * text.vocab_size * self.dtype_bytes,
            stream_bytes=tokens * (2 * text.hidden_size * self.dtype_bytes + text.vocab_size * _LOGIT_BYTES),
            kernels=self._launches.head,
        )

    def prefix(self, prompts: Sequence[Prompt]) -> Work:
        """The language model's prompt pass (models/prefix.py): the last layer stops at its keys and values, except for
        the last position of each prompt, and the head does not run."""
        tokens, pairs = sum(p.tokens for p in prompts), sum(_causal(p.tokens) for p in prompts)
        layer = self._projections(tokens) + self._attention(pairs) + self._finish(tokens)
        last = self._projections(tokens) + self._attention(tokens) + self._finish(len(prompts))
        return (self.shape.text.num_layers - 1) * layer + last

    def prefill(self, prompts: Sequence[Prompt]) -> Work:
        """The prompt pass of an engine of its own: every layer whole, and the head at the last position."""
        tokens, pairs = sum(p.tokens for p in prompts), sum(_causal(p.tokens) for p in prompts)
        return self.decoder(tokens, pairs) + self.head(len(prompts))

    def response(self, groups: Sequence[GroupLoad], *, head: bool = True) -> Work:
        """Log-probs of all responses on their prefixes, no gradient (train/response.py); head off: the layers alone.

        The last token of a response is not fed. Attention pads a group's responses to its longest; nothing else pads.
        """
        fed = [[n - 1 for n in group.responses if n > 1] for group in groups]
        layers = NOTHING
        if any(fed):
            tokens = sum(map(sum, fed))
            padded = [len(lengths) * max(lengths, default=0) for lengths in fed]
            own = sum(len(lengths) * _causal(max(lengths, default=0)) for lengths in fed)
            to_prompt = sum(queries * group.prompt.tokens for queries, group in zip(padded, groups, strict=True))
            layers = self._layers(tokens, own + to_prompt, self._launches.on_prefix)
        return layers + self.head(sum(group.response_tokens for group in groups)) if head else layers

    def response_backward(self, groups: Sequence[GroupLoad]) -> Work:
        """From the loss to the prefix boundary: gradients of keys and values of the prompts are added in fp32.

        The head's logits are computed again: three products where its forward has one.
        """
        tokens = sum(group.response_tokens for group in groups)
        head = self.head(tokens)
        layers = self.response(groups, head=False)
        text = self.shape.text
        width = 2 * text.num_layers * text.num_kv_heads * text.head_dim
        boundary = sum(group.prompt.tokens for group in groups) * width * (self.dtype_bytes + 2 * 4)
        again = head + self.backward(head)
        return self.backward(layers) + again + Work(stream_bytes=boundary)

    def prefix_backward(self, prompts: Sequence[Prompt], activations: Activations) -> Work:
        """The one backward through a pack of prompts, tower included, with what `activations` runs again before it.

        `checkpoint` runs each layer again up to the last tensor that its backward reads (torch's early stop), so not
        the product that ends it.
        """
        text = self.prefix(prompts)
        backward = self.backward(text) + self.vision_backward(prompts)
        if activations == "graph":
            return backward
        again = text + self.vision_again(prompts, activations)
        if activations == "checkpoint":
            rows = (self.shape.text.num_layers - 1) * sum(p.tokens for p in prompts) + len(prompts)
            skipped = (
                0 if self.experts else 2.0 * rows * self.shape.text.hidden_size * self.shape.text.intermediate_size
            )
            again += Work(matmul_flops=-skipped)
        return backward + again

    def full(self, groups: Sequence[GroupLoad]) -> Work:
        """Every response with its own copy of its prompt and media, all in one batch padded to the longest
        (`train.share_prefix: off`); no gradient."""
        rows = [(group.prompt, n) for group in groups for n in group.responses]
        longest = max(prompt.tokens + n for prompt, n in rows)
        tokens = len(rows) * longest
        layers = self.decoder(tokens, len(rows) * _causal(longest))
        return layers + self.vision([prompt for prompt, _ in rows]) + self.head(sum(n for _, n in rows))

    def full_backward(self, groups: Sequence[GroupLoad]) -> Work:
        """The backward of `full`, graph kept; the head's logits are computed again."""
        prompts = [group.prompt for group in groups for _ in group.responses]
        head = self.head(sum(group.response_tokens for group in groups))
        layers = self.full(groups) + -1.0 * (head + self.vision(prompts))
        towers = self.vision_backward(prompts)
        return self.backward(layers) + towers + head + self.backward(head)

    def decode_step(self, rows: float, pairs: float, cached_tokens: float) -> Work:
        """One token for each of `rows` responses, head included.

        pairs: sum of their contexts. cached_tokens: tokens whose keys and values are read, once for each time: a prompt
        that its group's rows read together counts once, as here (rollout/two_level.py), else once per row.
        """
        text = self.shape.text
        width = 2 * text.num_kv_heads * text.head_dim * self.dtype_bytes
        scores = _SCORE_PASSES * text.num_heads * pairs * self.dtype_bytes if self.eager else 0.0
        layer = self._projections(rows) + self._attention(pairs) + self._finish(rows)
        cache = Work(kv_bytes=cached_tokens * width, stream_bytes=scores)
        return text.num_layers * (layer + cache) + self.head(rows)

    # --- vision tower

    def vision(self, prompts: Sequence[Prompt]) -> Work:
        """Tower, merger and deepstack mergers on all media of `prompts`, forward."""
        if not any(p.patches for p in prompts):
            return NOTHING
        return self._patch_embedding(prompts) + self._blocks(prompts) + self._mergers(prompts)

    def vision_backward(self, prompts: Sequence[Prompt]) -> Work:
        """Its backward; pixels get no gradient. Nothing where the tower is frozen."""
        if not self.vision_trained or not any(p.patches for p in prompts):
            return NOTHING
        embedding = self._patch_embedding(prompts)
        whole = self.backward(embedding + self._blocks(prompts) + self._mergers(prompts))
        return whole + Work(matmul_flops=-embedding.matmul_flops)

    def vision_again(self, prompts: Sequence[Prompt], activations: Activations) -> Work:
        """What of the tower runs a second time, for its backward: a checkpoint leaves a frozen tower alone."""
        kept = activations == "graph" or (activations == "checkpoint" and not self.vision_trained)
        return NOTHING if kept else self.vision(prompts)

    def _patch_embedding(self, prompts: Sequence[Prompt]) -> Work:
        vision, patches = self.shape.vision, sum(p.patches for p in prompts)
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return self._product(patches, numbers, vision.hidden_size)

    def _blocks(self, prompts: Sequence[Prompt]) -> Work:
        vision, patches = self.shape.vision, sum(p.patches for p in prompts)
        width, mlp = vision.hidden_size, vision.intermediate_size
        matrices = 4 * width * width + (2 if self.shape.family == "qwen3_vl" else 3) * width * mlp
        per_patch = 14 * width + 3 * mlp  # as in a decoder layer, with A = K = H
        frames = [(grid, grid[0], grid[1] * grid[2]) for p in prompts for grid in p.grids]
        whole = sum(t * size**2 for _, t, size in frames)
        windows = whole
        if vision.window_size:
            windows = sum(t * n * size**2 for grid, t, _ in frames for size, n in window_sizes(grid, vision))
        full = len(vision.full_attention_blocks) if vision.window_size else vision.depth
        pairs = full * whole + (vision.depth - full) * windows
        calls, number = vision.depth, self._launches
        if self.eager:
            frame_sizes = {size for _, _, size in frames}
            cut = (
                {size for grid, _, _ in frames for size, _ in window_sizes(grid, vision)} if vision.window_size else ()
            )
            calls = full * len(frame_sizes) + (vision.depth - full) * len(cut)
        return Work(
            matmul_flops=2.0 * patches * matrices * vision.depth,
            attention_flops=4.0 * width * pairs,
            weight_bytes=matrices * vision.depth * self.dtype_bytes,
            stream_bytes=float(patches * per_patch * vision.depth * self.dtype_bytes),
            kernels=vision.depth * number.block + calls * number.call,
        )

    def _mergers(self, prompts: Sequence[Prompt]) -> Work:
        vision = self.shape.vision
        group = vision.spatial_merge_size**2
        tokens, width = sum(p.patches for p in prompts) // group, group * vision.hidden_size
        one = self._product(tokens, width, width) + self._product(tokens, width, vision.out_hidden_size)
        return (1 + len(vision.deepstack_layers)) * one

    # --- parts of a pass

    @property
    def _launches(self) -> Launches:
        return EAGER if self.eager else FUSED

    def backward(self, forward: Work) -> Work:
        """The backward of a forward pass, or of a part of one."""
        return forward.backward(self.dtype_bytes, launches=self._launches.backward)

    def _layers(self, tokens: float, pairs: float, kernels: int) -> Work:
        layer = self._projections(tokens) + self._attention(pairs, kernels) + self._finish(tokens)
        return self.shape.text.num_layers * layer

    @property
    def _mlp(self) -> int:
        return 3 * self.shape.text.hidden_size * self.shape.text.intermediate_size

    def _product(self, rows: float, inner: int, outer: int) -> Work:
        e = self.dtype_bytes
        return Work(2.0 * rows * inner * outer, 0.0, inner * outer * e, rows * outer * e, 0.0, 1)

    def _projections(self, tokens: float) -> Work:
        text = self.shape.text
        wide, narrow = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
        matrix = text.hidden_size * (wide + 2 * narrow)
        return Work(
            matmul_flops=2.0 * tokens * matrix,
            weight_bytes=matrix * self.dtype_bytes,
            stream_bytes=tokens * 2 * (text.hidden_size + wide + narrow) * self.dtype_bytes,
            kernels=self._launches.projections,
        )

    def _attention(self, pairs: float, kernels: int | None = None) -> Work:
        text = self.shape.text
        own = self._launches.attention if kernels is None else kernels
        return Work(attention_flops=4.0 * text.num_heads * text.head_dim * pairs, kernels=own)

    def _finish(self, tokens: float) -> Work:
        text, experts = self.shape.text, self.experts
        output = text.hidden_size * text.num_heads * text.head_dim
        active, read, router = 1, 1.0, 0
        if experts is not None:
            active, read, router = experts.active, experts.touched(tokens), experts.count * text.hidden_size
        moved = 8 * text.hidden_size + 3 * active * text.intermediate_size
        moved += 4 * active * text.hidden_size if experts is not None else 0  # rows sorted to experts and back
        return Work(
            matmul_flops=2.0 * tokens * (output + active * self._mlp + router),
            weight_bytes=(output + read * self._mlp + router) * self.dtype_bytes,
            stream_bytes=tokens * moved * self.dtype_bytes,
            kernels=self._launches.finish + (3 if experts is not None else 0),
        )


def _causal(length: float) -> float:
    """Pairs of a query with the keys up to its own position."""
    return length * (length + 1) / 2
