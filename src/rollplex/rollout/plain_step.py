"""The layers of a decode step as a function of tensors alone, for a decoder of plain matrices on one rank.

Written in the part of Python that TorchScript reads (uninterrupted.py). decode.py calls the modules of other decoders.

Shape letters: B rows, V vocabulary, H/K query and key/value heads, J = H + K (with v: H + 2 K), D head dim, X = J * D,
A = H * D, C hidden width, I MLP width (gate and up together twice that), M positions.
"""

from typing import NamedTuple  # no postponed annotations: TorchScript reads those of tuples as they are

import torch
from torch.nn import functional as F

from rollplex.models.norms import normed
from rollplex.models.rotary import turn_into
from rollplex.models.steady import missing_rows
from rollplex.rollout.two_level import LayerCaches, Sight, attend, scratch_for, store


class PlainLayer(NamedTuple):
    """Weights of one layer: matrices as products take them."""

    input_norm_C: torch.Tensor
    qkv_CX: torch.Tensor
    qkv_bias_X: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output_AC: torch.Tensor
    mlp_norm_C: torch.Tensor
    gate_up_CI: torch.Tensor
    down_IC: torch.Tensor


class PlainModel(NamedTuple):
    """A decoder's weights and sizes."""

    layers: list[PlainLayer]
    embedding_VC: torch.Tensor
    final_norm_C: torch.Tensor
    head_VC: torch.Tensor
    epsilon: float  # of all norms
    heads: int
    kv_heads: int
    head_dim: int


class Fed(NamedTuple):
    """What a step is fed."""

    tokens_B: torch.Tensor
    positions_B: torch.Tensor
    cos_M1D: torch.Tensor  # tables of models/rotary.py, with the root of the score's scaling in them
    sin_M1D: torch.Tensor
    sight: Sight
    lifted: bool  # float64 stays float64 in norms (models/precision.py)


def plain_step(model: PlainModel, caches: list[LayerCaches], fed: Fed) -> torch.Tensor:
    """(B, V) logits behind the tokens, whose keys and values are stored in `caches`, one for each layer."""
    rows, heads, kv_heads, head_dim = fed.tokens_B.shape[0], model.heads, model.kv_heads, model.head_dim
    missing = missing_rows(rows, model.head_VC)  # added to all products; attention goes without
    fed_rows = rows + missing
    tokens_B, positions_B = F.pad(fed.tokens_B, [0, missing]), F.pad(fed.positions_B, [0, missing])
    x_BC = model.embedding_VC.index_select(0, tokens_B)
    cos_B1D, sin_B1D = fed.cos_M1D.index_select(0, positions_B), fed.sin_M1D.index_select(0, positions_B)
    # What all layers write to, and its parts.
    qkv_BX = x_BC.new_empty([fed_rows, (heads + 2 * kv_heads) * head_dim])
    qk_BJD, v_BKD = qkv_BX.view(fed_rows, -1, head_dim).split_with_sizes([heads + kv_heads, kv_heads], 1)
    unturned_BHD, unturned_BKD = qk_BJD.split_with_sizes([heads, kv_heads], 1)
    turned_BJD = torch.empty([fed_rows, heads + kv_heads, head_dim], dtype=x_BC.dtype, device=x_BC.device)
    q_BHD, k_BKD = turned_BJD.split_with_sizes([heads, kv_heads], 1)
    gate_up_BI = x_BC.new_empty([fed_rows, model.layers[0].gate_up_CI.shape[1]])
    gate_BI, up_BI = gate_up_BI.chunk(2, -1)
    scratch = scratch_for(q_BHD[:rows], kv_heads, fed.sight)
    for layer, cache in zip(model.layers, caches):  # noqa: B905 TorchScript knows no `strict`
        h_BC = normed(x_BC, layer.input_norm_C, model.epsilon, fed.lifted)
        qkv_bias_X, q_norm_D, k_norm_D = layer.qkv_bias_X, layer.q_norm_D, layer.k_norm_D
        if qkv_bias_X is None:
            torch.mm(h_BC, layer.qkv_CX, out=qkv_BX)
        else:
            torch.addmm(qkv_bias_X, h_BC, layer.qkv_CX, out=qkv_BX)
        if q_norm_D is not None and k_norm_D is not None:
            unturned_BHD.copy_(normed(unturned_BHD, q_norm_D, model.epsilon, fed.lifted))
            unturned_BKD.copy_(normed(unturned_BKD, k_norm_D, model.epsilon, fed.lifted))
        turn_into(turned_BJD, qk_BJD, cos_B1D, sin_B1D)
        store(k_BKD[:rows], v_BKD[:rows], cache, fed.sight)
        mixed_BA = attend(scratch, cache, fed.sight)
        if missing:
            mixed_BA = F.pad(mixed_BA, [0, 0, 0, missing])
        torch.addmm(x_BC, mixed_BA, layer.output_AC, out=x_BC)
        torch.mm(normed(x_BC, layer.mlp_norm_C, model.epsilon, fed.lifted), layer.gate_up_CI, out=gate_up_BI)
        torch.addmm(x_BC, F.silu(gate_BI).mul_(up_BI), layer.down_IC, out=x_BC)
    return logits(x_BC, model, fed.lifted)[:rows]


def logits(hidden_BC: torch.Tensor, model: PlainModel, lifted: bool) -> torch.Tensor:
    """(B, V) of hidden states before the final norm."""
    rows = hidden_BC.shape[0]
    missing = missing_rows(rows, hidden_BC)
    if missing:
        hidden_BC = F.pad(hidden_BC, [0, 0, 0, missing])
    return F.linear(normed(hidden_BC, model.final_norm_C, model.epsilon, lifted), model.head_VC)[:rows]
