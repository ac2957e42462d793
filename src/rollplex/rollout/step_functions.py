"""A decode step as functions of tensors alone, in the part of Python that TorchScript reads (uninterrupted.py).

Shape letters: B rows (with those that steady.py adds to products; attention goes without), V vocabulary, H/K query and
key/value heads, J = H + K (with v: H + 2 K), D head dim, X = J * D, A = H * D, C hidden width, I MLP width (2 I: gate
and up), M positions, R rank of an adapter.
"""

from typing import NamedTuple  # no postponed annotations: TorchScript reads those of tuples as they are

import torch
from torch.nn import functional as F

from rollplex.models.norms import normed
from rollplex.models.rotary import turn_into
from rollplex.models.steady import missing_rows
from rollplex.rollout.two_level import LayerCaches, Scratch, Sight, attend, scratch_for, store


class LowRank(NamedTuple):
    """A LoRA adapter: (h @ down) @ up * scaling, in its own dtype, comes on top of a product with h."""

    down_CR: torch.Tensor
    up_RX: torch.Tensor
    scaling: float


class Product(NamedTuple):
    """A linear module: h @ matrix + bias, with what its adapter adds."""

    matrix_CX: torch.Tensor
    bias_X: torch.Tensor | None
    adapter: LowRank | None


class LayerWeights(NamedTuple):
    """Weights of one layer."""

    input_norm_C: torch.Tensor
    qkv: list[Product]  # side by side to X
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output: Product  # A to C
    mlp_norm_C: torch.Tensor
    gate_up: list[Product]  # side by side to 2 I
    down: Product  # I to C


class Sizes(NamedTuple):
    """Of the decoder as this rank holds it."""

    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # I
    epsilon: float  # of all norms


class DecoderWeights(NamedTuple):
    """A decoder, as this rank holds it."""

    sizes: Sizes
    layers: list[LayerWeights]
    embedding_VC: torch.Tensor
    final_norm_C: torch.Tensor
    head_VC: torch.Tensor


class Fed(NamedTuple):
    """What a step is fed, row by row."""

    tokens_B: torch.Tensor
    positions_B: torch.Tensor
    cos_M1D: torch.Tensor  # tables of models/rotary.py, with the root of the score's scaling in them
    sin_M1D: torch.Tensor
    sight: Sight
    lifted: bool  # float64 stays float64 in norms (models/precision.py)


class Step(NamedTuple):
    """What all layers of a step share: sizes, its rows of the rotary tables, buffers that they write to and views of
    those."""

    sizes: Sizes
    sight: Sight
    lifted: bool
    missing: int  # rows behind those that are fed
    cos_B1D: torch.Tensor
    sin_B1D: torch.Tensor
    qkv_BX: torch.Tensor
    qk_BJD: torch.Tensor
    q_BHD: torch.Tensor
    k_BKD: torch.Tensor
    turned_BJD: torch.Tensor
    turned_k_BKD: torch.Tensor  # without missing rows, as the next
    v_BKD: torch.Tensor
    scratch: Scratch
    gate_up_BI: torch.Tensor
    gate_BI: torch.Tensor
    up_BI: torch.Tensor


def step_logits(weights: DecoderWeights, caches: list[LayerCaches], fed: Fed) -> torch.Tensor:
    """(B, V) logits behind the tokens, whose keys and values are stored in `caches`, one for each layer. Where ranks
    share the layers decode.py does the same, with sums between their parts."""
    tokens_B = F.pad(fed.tokens_B, [0, missing_rows(fed.tokens_B.shape[0], weights.head_VC)])
    x_BC = through_layers(weights.embedding_VC.index_select(0, tokens_B), weights, caches, fed)
    return head(x_BC, weights, fed.lifted)[: fed.tokens_B.shape[0]]


def through_layers(x_BC: torch.Tensor, weights: DecoderWeights, caches: list[LayerCaches], fed: Fed) -> torch.Tensor:
    """x behind the last layer, in place. Buffers end with it: scores may be larger than logits."""
    step = begin(x_BC, weights.sizes, fed)
    for layer, cache in zip(weights.layers, caches):  # noqa: B905 TorchScript knows no `strict`
        add_product(x_BC, attended(x_BC, layer, cache, step), layer.output)
        add_product(x_BC, activated(x_BC, layer, step), layer.down)
    return x_BC


def begin(x_BC: torch.Tensor, sizes: Sizes, fed: Fed) -> Step:
    """What the layers share; x: embeddings of the tokens and of missing rows, or anything like them."""
    rows, fed_rows, heads, kv_heads = x_BC.shape[0], fed.tokens_B.shape[0], sizes.heads, sizes.kv_heads
    positions_B = F.pad(fed.positions_B, [0, rows - fed_rows])
    qkv_BX = x_BC.new_empty([rows, (heads + 2 * kv_heads) * sizes.head_dim])
    qk_BJD, v_BKD = qkv_BX.view(rows, -1, sizes.head_dim).split_with_sizes([heads + kv_heads, kv_heads], 1)
    q_BHD, k_BKD = qk_BJD.split_with_sizes([heads, kv_heads], 1)
    turned_BJD = x_BC.new_empty([rows, heads + kv_heads, sizes.head_dim])
    turned_q_BHD, turned_k_BKD = turned_BJD[:fed_rows].split_with_sizes([heads, kv_heads], 1)
    gate_up_BI = x_BC.new_empty([rows, 2 * sizes.mlp_width])
    gate_BI, up_BI = gate_up_BI.chunk(2, -1)
    return Step(
        sizes=sizes,
        sight=fed.sight,
        lifted=fed.lifted,
        missing=rows - fed_rows,
        cos_B1D=fed.cos_M1D.index_select(0, positions_B),
        sin_B1D=fed.sin_M1D.index_select(0, positions_B),
        qkv_BX=qkv_BX,
        qk_BJD=qk_BJD,
        q_BHD=q_BHD,
        k_BKD=k_BKD,
        turned_BJD=turned_BJD,
        turned_k_BKD=turned_k_BKD,
        v_BKD=v_BKD[:fed_rows],
        scratch=scratch_for(turned_q_BHD, kv_heads, fed.sight),
        gate_up_BI=gate_up_BI,
        gate_BI=gate_BI,
        up_BI=up_BI,
    )


def attended(x_BC: torch.Tensor, layer: LayerWeights, cache: LayerCaches, step: Step) -> torch.Tensor:
    """(B, A): what the layer's output projection takes."""
    h_BC = normed(x_BC, layer.input_norm_C, step.sizes.epsilon, step.lifted)
    fill(step.qkv_BX, h_BC, layer.qkv)
    q_norm_D, k_norm_D = layer.q_norm_D, layer.k_norm_D
    if q_norm_D is not None and k_norm_D is not None:
        step.q_BHD.copy_(normed(step.q_BHD, q_norm_D, step.sizes.epsilon, step.lifted))
        step.k_BKD.copy_(normed(step.k_BKD, k_norm_D, step.sizes.epsilon, step.lifted))
    turn_into(step.turned_BJD, step.qk_BJD, step.cos_B1D, step.sin_B1D)
    store(step.turned_k_BKD, step.v_BKD, cache, step.sight)
    mixed_BA = attend(step.scratch, cache, step.sight)
    return F.pad(mixed_BA, [0, 0, 0, step.missing]) if step.missing > 0 else mixed_BA


def activated(x_BC: torch.Tensor, layer: LayerWeights, step: Step) -> torch.Tensor:
    """(B, I): what the layer's down projection takes."""
    fill(step.gate_up_BI, normed(x_BC, layer.mlp_norm_C, step.sizes.epsilon, step.lifted), layer.gate_up)
    return F.silu(step.gate_BI).mul_(step.up_BI)


def attention_part(x_BC: torch.Tensor, layer: LayerWeights, cache: LayerCaches, step: Step) -> torch.Tensor:
    """(B, C): this rank's part of what the attention adds to x."""
    return torch.mm(attended(x_BC, layer, cache, step), layer.output.matrix_CX)


def mlp_part(x_BC: torch.Tensor, layer: LayerWeights, step: Step) -> torch.Tensor:
    """(B, C): this rank's part of what the MLP adds to x."""
    return torch.mm(activated(x_BC, layer, step), layer.down.matrix_CX)


def head(hidden_BC: torch.Tensor, weights: DecoderWeights, lifted: bool) -> torch.Tensor:
    """(B, V) logits of hidden states before the final norm, of the rank's part of the vocabulary."""
    rows = hidden_BC.shape[0]
    missing = missing_rows(rows, hidden_BC)
    if missing:
        hidden_BC = F.pad(hidden_BC, [0, 0, 0, missing])
    h_BC = normed(hidden_BC, weights.final_norm_C, weights.sizes.epsilon, lifted)
    return F.linear(h_BC, weights.head_VC)[:rows]


def fill(out_BX: torch.Tensor, h_BC: torch.Tensor, products: list[Product]) -> None:
    """The products' outputs side by side."""
    start = 0
    for product in products:
        part_BX = out_BX[:, start : start + product.matrix_CX.shape[1]]
        start += product.matrix_CX.shape[1]
        bias_X = product.bias_X
        if bias_X is None:
            torch.mm(h_BC, product.matrix_CX, out=part_BX)
        else:
            torch.addmm(bias_X, h_BC, product.matrix_CX, out=part_BX)
        adapt(part_BX, h_BC, product.adapter)


def add_product(x_BC: torch.Tensor, h_BI: torch.Tensor, product: Product) -> None:
    """x += product(h)."""
    torch.addmm(x_BC, h_BI, product.matrix_CX, out=x_BC)
    bias_C = product.bias_X
    if bias_C is not None:
        x_BC.add_(bias_C)
    adapt(x_BC, h_BI, product.adapter)


def adapt(out_BX: torch.Tensor, h_BC: torch.Tensor, adapter: LowRank | None) -> None:
    """Add what an adapter makes of h."""
    if adapter is not None:
        change_BX = torch.mm(torch.mm(h_BC.to(adapter.down_CR.dtype), adapter.down_CR), adapter.up_RX)
        out_BX.add_(change_BX, alpha=adapter.scaling)
