"""Attention of one decode step: each row over its group's prompt, held once per group, and over its own suffix.

All layers of a step share their buffers, and views into them are made once a step: a view costs the interpreter as much
as an operation, and each is waited for while passes run beside decoding (docs/lab-notes.md).

Shape letters: B rows, G groups, N rows that a group has room for, H/K/E query heads, key/value heads, their ratio,
D head dim, P prompt places, R suffix places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollplex.models.steady import product_into


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
class Seen:
    """How many places a step's rows look at; `bias` is added to scores, -inf where nothing is to be seen, None: all
    is. Of prompts (G, 1, 1, P), of suffixes (B, 1, 1, R)."""

    places: int
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Keys and values of one layer, with the score's scaling in queries and keys."""

    prompt_keys: torch.Tensor  # (G * K, D, P)
    prompt_values: torch.Tensor  # (G * K, P, D)
    suffix_keys: torch.Tensor  # (B * K, D, R)
    suffix_values: torch.Tensor  # (B * K, R, D)


class StepAttention:
    """Softmax of queries over [the group's prompt, the row's suffix], layer after layer.

    A row must see at least one place. What a call returns is overwritten by the next one.
    """

    def __init__(self, q_BHD: torch.Tensor, num_kv: int, prompt: Seen, suffix: Seen, grid: Grid):
        """q_BHD: where each layer's queries will be."""
        rows, _, head_dim = q_BHD.shape
        q_BKED = q_BHD.unflatten(1, (num_kv, -1))
        repeat, places = q_BKED.shape[2], prompt.places + suffix.places
        by_cell = grid.groups, num_kv, grid.width, repeat
        by_group = grid.groups * num_kv, grid.width * repeat  # all queries of a group that read one key/value head
        by_row = rows * num_kv, repeat
        self._prompt_bias = None if prompt.bias is None else prompt.bias.unsqueeze(1)  # as (G, K, N, E, P)
        self._suffix_bias = suffix.bias

        q_rows, q_cells = q_BHD.new_empty(q_BKED.shape), q_BHD.new_empty(*by_cell, head_dim)
        self._queries, self._q_rows = q_BKED, q_rows
        self._q_to_cells = _ToCells(q_rows, q_cells, grid)
        self._q_by_row, self._q_by_group = q_rows.view(*by_row, head_dim), q_cells.view(*by_group, head_dim)

        # Scores lie as those of the prompt do, of which there are more: only those of the suffix are moved.
        self._scores = q_BHD.new_empty(*by_cell, places)
        self._weights = torch.empty_like(self._scores)
        parts = [prompt.places, suffix.places]
        self._to_prompt, moved = self._scores.split_with_sizes(parts, dim=-1)
        self._to_prompt_by_group = self._scores.view(*by_group, places)[..., : prompt.places]
        self._to_suffix = q_BHD.new_empty(*q_BKED.shape[:3], suffix.places)
        self._to_suffix_by_row = self._to_suffix.view(*by_row, suffix.places)
        self._scores_to_cells = _ToCells(self._to_suffix, moved, grid)

        self._over_prompt = self._weights.view(*by_group, places)[..., : prompt.places]
        over_suffix = torch.empty_like(self._to_suffix)
        self._weights_to_rows = _ToRows(self._weights[..., prompt.places :], over_suffix, grid)
        self._over_suffix = over_suffix.view(*by_row, suffix.places)

        from_prompt, mixed = torch.empty_like(q_cells), torch.empty_like(q_rows)
        self._from_prompt, self._from_suffix = from_prompt.view_as(self._q_by_group), torch.empty_like(self._q_by_row)
        self._prompt_to_rows = _ToRows(from_prompt, mixed, grid)
        self._mixed_by_row, self._mixed = mixed.view_as(self._q_by_row), mixed.view(rows, -1)

    def __call__(self, layer: LayerCaches) -> torch.Tensor:
        """(B, H * D), of the queries as they are now."""
        self._q_rows.copy_(self._queries)
        self._q_to_cells()
        product_into(self._q_by_group, layer.prompt_keys, self._to_prompt_by_group)
        if self._prompt_bias is not None:
            self._to_prompt.add_(self._prompt_bias)
        product_into(self._q_by_row, layer.suffix_keys, self._to_suffix_by_row)
        if self._suffix_bias is not None:
            self._to_suffix.add_(self._suffix_bias)
        self._scores_to_cells()
        self._softmax()
        self._weights_to_rows()
        product_into(self._over_prompt, layer.prompt_values, self._from_prompt)
        product_into(self._over_suffix, layer.suffix_values, self._from_suffix)
        self._prompt_to_rows()
        torch.add(self._mixed_by_row, self._from_suffix, out=self._mixed_by_row)
        return self._mixed

    def _softmax(self) -> None:
        if self._scores.dtype in (torch.float32, torch.float64):
            torch.softmax(self._scores, -1, out=self._weights)
        else:
            self._weights.copy_(self._scores.softmax(-1, dtype=torch.float32))


class _ToCells:
    """Copies (B, K, E, x) to (G, K, N, E, x)."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, grid: Grid):
        self._source, self._target, self._rows_GN = source, target, grid.rows_GN
        shape = grid.groups * grid.width, *source.shape[1:]
        self._cells = source if grid.rows_GN is None else source.new_empty(shape)
        self._placed = self._cells.view(grid.groups, grid.width, *source.shape[1:]).transpose(1, 2)

    def __call__(self) -> None:
        if self._rows_GN is not None:
            torch.index_select(self._source, 0, self._rows_GN, out=self._cells)
        self._target.copy_(self._placed)


class _ToRows:
    """Copies (G, K, N, E, x) to (B, K, E, x)."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, grid: Grid):
        self._placed, self._target, self._cells_B = source.transpose(1, 2), target, grid.cells_B
        shape = grid.groups * grid.width, *target.shape[1:]
        self._cells = target if grid.cells_B is None else target.new_empty(shape)
        self._by_group = self._cells.view(grid.groups, grid.width, *target.shape[1:])

    def __call__(self) -> None:
        self._by_group.copy_(self._placed)
        if self._cells_B is not None:
            torch.index_select(self._cells, 0, self._cells_B, out=self._target)


def bias_where(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(..., 1, 1, places): -inf where `hidden` (..., places) is true, else 0."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, float("-inf"))[..., None, None, :]
