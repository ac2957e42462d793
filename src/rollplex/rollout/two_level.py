"""Attention of one decode step: each row over its group's prompt, held once per group, and over its own suffix.

Shape letters: B rows, G groups, N rows that a group has room for, H/K/E query heads, key/value heads, their ratio,
D head dim, P prompt places, R suffix places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollplex.models.steady import product


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows as the cells of a table with one line for each group.

    rows_GN: the row in each cell, any row in an empty one; cells_B: the cell of each row. None: rows are the cells in
    order.
    """

    groups: int
    width: int  # N
    rows_GN: torch.Tensor | None = None
    cells_B: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Keys and values of one layer; `bias` is added to scores, -inf where nothing is to be seen, None: all is."""

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None


def attend(q_BHD: torch.Tensor, prompt: Places, suffix: Places, grid: Grid) -> torch.Tensor:
    """(B, H * D): softmax over [the group's prompt, the row's suffix]; the score's scaling is in queries and keys.

    prompt: keys (G, K, D, P), values (G, K, P, D), bias (G, 1, 1, P). suffix: keys and values (B, K, R, D), bias
    (B, 1, 1, R). A row must see at least one place.
    """
    num_kv, head_dim = suffix.keys.shape[1], suffix.keys.shape[3]
    rows, groups, width = q_BHD.shape[0], grid.groups, grid.width
    q_BKED = q_BHD.reshape(rows, num_kv, -1, head_dim)
    repeat = q_BKED.shape[2]
    cells = q_BKED if grid.rows_GN is None else q_BKED.index_select(0, grid.rows_GN)
    by_group = (groups, width, num_kv, repeat)
    q_GKSD = cells.view(*by_group, head_dim).transpose(1, 2).reshape(groups, num_kv, width * repeat, head_dim)
    to_prompt = product(q_GKSD, prompt.keys)
    if prompt.bias is not None:
        to_prompt += prompt.bias
    to_suffix = product(q_BKED, suffix.keys.transpose(2, 3))
    if suffix.bias is not None:
        to_suffix += suffix.bias
    parts = [to_prompt.shape[-1], to_suffix.shape[-1]]
    if grid.rows_GN is None:  # (G, N, K, E, P + R), joined from where the scores lie
        scores = torch.cat((_by_row(to_prompt, grid, repeat), to_suffix.view(*by_group, parts[1])), dim=-1)
        over_prompt, over_suffix = _softmax(scores).split_with_sizes(parts, dim=-1)
        over_suffix = over_suffix.view(rows, num_kv, repeat, parts[1])
    else:
        scores = torch.cat((_to_rows(to_prompt, grid, repeat), to_suffix), dim=-1)
        over_prompt, over_suffix = _softmax(scores).split_with_sizes(parts, dim=-1)
        over_prompt = over_prompt.index_select(0, grid.rows_GN).view(*by_group, parts[0])
    over_prompt = over_prompt.transpose(1, 2).reshape(groups, num_kv, width * repeat, parts[0])
    mixed = product(over_suffix, suffix.values) + _to_rows(product(over_prompt, prompt.values), grid, repeat)
    return mixed.view(rows, -1)


def bias_where(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(..., 1, 1, places): -inf where `hidden` (..., places) is true, else 0."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, float("-inf"))[..., None, None, :]


def _by_row(x_GKSx: torch.Tensor, grid: Grid, repeat: int) -> torch.Tensor:
    """(G, K, N * E, x) -> (G, N, K, E, x), a view."""
    return x_GKSx.view(*x_GKSx.shape[:2], grid.width, repeat, x_GKSx.shape[3]).transpose(1, 2)


def _to_rows(x_GKSx: torch.Tensor, grid: Grid, repeat: int) -> torch.Tensor:
    """(G, K, N * E, x) -> (B, K, E, x)."""
    cells = _by_row(x_GKSx, grid, repeat)
    if grid.cells_B is None and grid.groups == 1:
        return cells[0]
    cells = cells.flatten(0, 1)
    return cells if grid.cells_B is None else cells.index_select(0, grid.cells_B)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    if scores.dtype in (torch.float32, torch.float64):
        return scores.softmax(-1)
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
