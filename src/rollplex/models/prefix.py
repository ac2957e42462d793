"""The prompt pass: keys, values and last hidden state of each prompt, computed once and used by every response.

f_theta(x) = ((K, V) of every layer after RoPE; h, the last position's hidden state before the final norm), DESIGN.md
section 2. Prompts are packed (no padding) up to a token budget; a `PrefixPack` is one such pass. Its lifetime is
    compute -> any number of response passes adding into grad_k, grad_v, grad_h -> one backward -> released.
Three ways to hold what the backward needs, all exact: keep the graph; checkpoint (keep layer inputs); recompute (keep
nothing, run the pass again with gradient). Layers run in chunks of rows where `policy.chunk_tokens` asks for it
(row_chunks.py), alike in all passes. In the last layer only the last position runs past its keys and values:
no other output of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from rollplex.errors import StateError
from rollplex.models.adapter import VisionFeatures
from rollplex.models.attention import PrefixKV, accumulation_dtype, by_run, causal_attention
from rollplex.models.policy import Policy
from rollplex.models.row_chunks import RowChunks, joined
from rollplex.models.steady import product
from rollplex.types import PromptSpec

Activations = Literal["graph", "checkpoint", "recompute", "none"]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _Boundary:
    """Outputs of one pass over a pack: per layer (T, K, D) keys and values, and (G, C) last hidden states."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    hidden_GC: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All boundary tensors in a fixed order."""
        return [*self.keys, *self.values, self.hidden_GC]


@dataclass(slots=True)
class PrefixPack:
    """The prefixes of some prompts under one weight version. Mutable: gradients accumulate, then it is consumed."""

    policy: Policy
    specs: tuple[PromptSpec, ...]
    lengths: tuple[int, ...]  # tokens of each prompt
    weight_version: int
    activations: Activations
    graph: _Boundary | None  # outputs with their autograd graph, for graph and checkpoint
    keys: list[torch.Tensor]  # detached (T, K, D) per layer
    values: list[torch.Tensor]
    hidden_GC: torch.Tensor  # detached
    grad_keys: list[torch.Tensor] = field(default_factory=list)  # fp32 (fp64 for fp64), empty until wanted
    grad_values: list[torch.Tensor] = field(default_factory=list)
    grad_hidden_GC: torch.Tensor | None = None
    consumed: bool = False

    def check_current(self) -> None:
        """Refuse a prefix of other weights, or one whose backward has run."""
        if self.weight_version != self.policy.weight_version:
            raise StateError(
                f"prefix of rows {[s.row for s in self.specs]} was computed with weights v{self.weight_version}, the "
                f"policy now has v{self.policy.weight_version}; compute it again after every optimizer step"
            )
        if self.consumed:
            raise StateError(f"prefix of rows {[s.row for s in self.specs]} was already consumed")

    def want_grads(self) -> None:
        """Allocate the boundary accumulators (once)."""
        if self.grad_hidden_GC is None:
            math = accumulation_dtype(self.hidden_GC.dtype)
            self.grad_keys = [torch.zeros_like(k, dtype=math) for k in self.keys]
            self.grad_values = [torch.zeros_like(v, dtype=math) for v in self.values]
            self.grad_hidden_GC = torch.zeros_like(self.hidden_GC, dtype=math)

    def release(self) -> None:
        """Drop everything; any later use raises."""
        self.consumed = True
        self.graph, self.keys, self.values = None, [], []
        self.grad_keys, self.grad_values, self.grad_hidden_GC = [], [], None

    def rows(self, number: int) -> slice:
        """Rows of prompt `number`."""
        start = sum(self.lengths[:number])
        return slice(start, start + self.lengths[number])

    def kv(self, layer: int, first: int, count: int, *, with_grads: bool) -> PrefixKV:
        """Views (G, K, P, D) of the `count` equally long prompts from number `first` on in `layer`."""
        start, length = self.rows(first).start, self.lengths[first]
        part = slice(start, start + count * length)
        tensors = [self.keys[layer], self.values[layer]]
        if with_grads:
            tensors += [self.grad_keys[layer], self.grad_values[layer]]
        views = [by_run(t[part], count, length) for t in tensors]
        return PrefixKV(views[0], views[1], *(views[2:] if with_grads else (None, None)))


def compute_prefix(policy: Policy, specs: Sequence[PromptSpec], activations: Activations) -> PrefixPack:
    """Run the prompt pass of `specs` as one pack. activations="none": no backward will follow (reference, scoring)."""
    keep_graph = activations in ("graph", "checkpoint")
    with torch.set_grad_enabled(keep_graph):
        boundary = _forward(policy, specs, checkpointed=activations == "checkpoint")
    return PrefixPack(
        policy=policy,
        specs=tuple(specs),
        lengths=tuple(spec.num_tokens for spec in specs),
        weight_version=policy.weight_version,
        activations=activations,
        graph=boundary if keep_graph else None,
        keys=_detached(boundary.keys),
        values=_detached(boundary.values),
        hidden_GC=boundary.hidden_GC.detach(),
    )


def _detached(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def backward_prefix(pack: PrefixPack) -> None:
    """The one prefix backward: push the accumulated boundary gradients into parameters, then release everything."""
    pack.check_current()
    if pack.grad_hidden_GC is None or pack.activations == "none":
        raise StateError(f"prefix of rows {[s.row for s in pack.specs]} has no boundary gradients to push back")
    outputs = pack.graph
    if outputs is None:
        with torch.enable_grad():
            outputs = _forward(pack.policy, pack.specs, checkpointed=False)
    grads = [*pack.grad_keys, *pack.grad_values, pack.grad_hidden_GC]
    pairs = [(t, g.to(t.dtype)) for t, g in zip(outputs.tensors(), grads, strict=True) if t.requires_grad]
    pack.release()
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _forward(policy: Policy, specs: Sequence[PromptSpec], *, checkpointed: bool) -> _Boundary:
    adapter, device = policy.adapter, policy.device
    lengths = [spec.num_tokens for spec in specs]
    types_T = torch.cat([spec.token_types for spec in specs]).to(device)
    positions_3T = torch.cat([spec.positions for spec in specs], dim=1).to(device)
    run: Callable[..., Any] = _checkpointed if checkpointed else _plain
    vision = run(policy.encode, specs)
    x_TC = adapter.embed(torch.cat([spec.input_ids for spec in specs]).to(device))
    visual_T = types_T > 0
    if vision is not None:
        x_TC = x_TC.masked_scatter(visual_T.unsqueeze(-1), vision.embeds.to(x_TC.dtype))
    cos_T1D, sin_T1D = adapter.rotary(positions_3T, x_TC.dtype)
    last_G = torch.tensor(lengths, device=device).cumsum(0) - 1
    chunks = RowChunks.of(lengths, policy.chunk_tokens, x_TC)
    keys, values = [], []
    for number, layer in enumerate(adapter.layers):
        is_last = number == adapter.shape.num_layers - 1
        step = _last_layer if is_last else _layer
        x_TC, k_TKD, v_TKD = run(step, policy, layer, x_TC, cos_T1D, sin_T1D, chunks, last_G)
        keys.append(k_TKD)
        values.append(v_TKD)
        if vision is not None and number < len(vision.deepstack):
            rows = _deepstack_rows(vision, number, visual_T, last_G if is_last else None)
            x_TC = x_TC.index_add(0, rows[0], rows[1].to(x_TC.dtype))
    return _Boundary(keys, values, x_TC)


def _deepstack_rows(
    vision: VisionFeatures, level: int, visual_T: torch.Tensor, last_G: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(row index, features) to add after a layer; after the last layer only last positions exist."""
    rows = visual_T.nonzero().squeeze(1)
    features = vision.deepstack[level]
    if last_G is None:
        return rows, features
    hits = (rows[:, None] == last_G[None, :]).nonzero()
    return hits[:, 1], features.index_select(0, hits[:, 0])


def _layer(  # noqa: PLR0913, PLR0917 - a pure function of its inputs, so that it can be run again
    policy: Policy,
    layer: Any,
    x_TC: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    chunks: RowChunks,
    _last_G: torch.Tensor,
) -> Triple:
    q_THD, k_TKD, v_TKD = _qkv(policy, layer, chunks, x_TC, cos_T1D, sin_T1D)
    mixed_TC = causal_attention(q_THD, k_TKD, v_TKD, chunks, policy.adapter.shape.scaling)
    x_TC = joined([policy.adapter.finish(layer, *rows) for rows in chunks.rows(x_TC, mixed_TC)])
    return x_TC, k_TKD, v_TKD


def _last_layer(  # noqa: PLR0913, PLR0917 - same signature as _layer
    policy: Policy,
    layer: Any,
    x_TC: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    chunks: RowChunks,
    last_G: torch.Tensor,
) -> Triple:
    q_THD, k_TKD, v_TKD = _qkv(policy, layer, chunks, x_TC, cos_T1D, sin_T1D)
    shape = policy.adapter.shape
    repeat = shape.num_heads // shape.num_kv_heads
    mixed = []
    for number, (k_PKD, v_PKD) in enumerate(zip(k_TKD.split(chunks.lengths), v_TKD.split(chunks.lengths), strict=True)):
        q_KED = q_THD[last_G[number]].unflatten(0, (-1, repeat))
        scores_KEP = product(q_KED * shape.scaling, k_PKD.permute(1, 2, 0))
        weights_KEP = scores_KEP.softmax(-1, dtype=accumulation_dtype(scores_KEP.dtype)).to(scores_KEP.dtype)
        mixed.append(product(weights_KEP, v_PKD.transpose(0, 1)).flatten())
    return policy.adapter.finish(layer, x_TC[last_G], torch.stack(mixed)), k_TKD, v_TKD


def _qkv(policy: Policy, layer: Any, chunks: RowChunks, *tensors: torch.Tensor) -> Triple:
    """Of all rows, from their hidden states and rotary tables."""
    parts = [policy.adapter.qkv(layer, *rows) for rows in chunks.rows(*tensors)]
    q_THD, k_TKD, v_TKD = (joined(part) for part in zip(*parts, strict=True))
    return q_THD, k_TKD, v_TKD


def _plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
