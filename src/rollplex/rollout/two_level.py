"""Attention of one decode step: each row over its group's prompt, held once per group, and over its own suffix.

Functions of tensors alone, in the part of Python that TorchScript reads (uninterrupted.py). All layers of a step share
their buffers, and views into them are made once a step: a view costs as much as a small operation.

Shape letters: B rows, G groups, N rows that a group has room for, H/K/E query heads, key/value heads, their ratio,
D head dim, P prompt places, R suffix places.
"""

from typing import NamedTuple  # no postponed annotations: TorchScript reads those of tuples as they are

import torch

from rollplex.models.steady import product_into


class Grid(NamedTuple):
    """Rows as the cells of a table with one line for each group.

    rows_GN: the row in each cell, any row in an empty one; cells_B: the cell of each row. None: rows are the cells in
    order.
    """

    groups: int
    width: int  # N
    rows_GN: torch.Tensor | None = None
    cells_B: torch.Tensor | None = None


class Seen(NamedTuple):
    """How many places a step's rows look at; `bias` is added to scores, -inf where nothing is to be seen, None: all
    is. Of prompts (G, 1, 1, P), of suffixes (B, 1, 1, R)."""

    places: int
    bias: torch.Tensor | None = None


class Sight(NamedTuple):
    """What the rows of a step see, the same in all layers, and where the keys and values of their own tokens go."""

    prompt: Seen
    suffix: Seen  # this step's token included
    grid: Grid
    stored_B: torch.Tensor | None = None  # the place in each row's suffix; None: the last that is seen, in every row


class LayerCaches(NamedTuple):
    """Keys and values of one layer, with the score's scaling in queries and keys. Suffixes have room for more rows and
    places than are seen."""

    prompt_keys: torch.Tensor  # (G * K, D, P)
    prompt_values: torch.Tensor  # (G * K, P, D)
    suffix_keys: torch.Tensor  # (B or more, K, R or more, D)
    suffix_values: torch.Tensor


class Scratch(NamedTuple):
    """Where the layers of a step attend, one after another: buffers and views of them, one row of each line read by
    the products of `attend`."""

    queries: torch.Tensor  # (B, K, E, D), where each layer's queries will be
    q_rows: torch.Tensor  # (B, K, E, D)
    q_by_row: torch.Tensor  # (B * K, E, D)
    q_cells: torch.Tensor  # (G, K, N, E, D)
    q_by_group: torch.Tensor  # (G * K, N * E, D): all queries of a group that read one key/value head
    scores: torch.Tensor  # (G, K, N, E, P + R)
    weights: torch.Tensor
    to_prompt_by_group: torch.Tensor  # (G * K, N * E, P), a part of the scores
    over_prompt_by_group: torch.Tensor  # a part of the weights
    suffix_rows: torch.Tensor  # (B, K, E, R): scores, then weights
    suffix_by_row: torch.Tensor  # (B * K, E, R)
    from_prompt: torch.Tensor  # (G, K, N, E, D)
    from_prompt_by_group: torch.Tensor
    from_suffix: torch.Tensor  # (B * K, E, D)
    mixed: torch.Tensor  # (B, K, E, D)
    mixed_by_row: torch.Tensor


def scratch_for(q_BHD: torch.Tensor, num_kv: int, sight: Sight) -> Scratch:
    """Buffers of one step. q_BHD: where each layer's queries will be."""
    rows, head_dim = q_BHD.shape[0], q_BHD.shape[2]
    repeat = q_BHD.shape[1] // num_kv
    places = sight.prompt.places + sight.suffix.places
    groups, width = sight.grid.groups, sight.grid.width
    by_group = groups * num_kv, width * repeat
    by_row = rows * num_kv, repeat
    q_rows = torch.empty([rows, num_kv, repeat, head_dim], dtype=q_BHD.dtype, device=q_BHD.device)
    q_cells = q_rows.new_empty([groups, num_kv, width, repeat, head_dim])
    # Scores lie as those of the prompt do, of which there are more: only those of the suffix are moved.
    scores = q_rows.new_empty([groups, num_kv, width, repeat, places])
    weights = torch.empty_like(scores)
    suffix_rows = q_rows.new_empty([rows, num_kv, repeat, sight.suffix.places])
    from_prompt, mixed = torch.empty_like(q_cells), torch.empty_like(q_rows)
    return Scratch(
        queries=q_BHD.unflatten(1, [num_kv, repeat]),
        q_rows=q_rows,
        q_by_row=q_rows.view(by_row[0], by_row[1], head_dim),
        q_cells=q_cells,
        q_by_group=q_cells.view(by_group[0], by_group[1], head_dim),
        scores=scores,
        weights=weights,
        to_prompt_by_group=scores.view(by_group[0], by_group[1], places)[..., : sight.prompt.places],
        over_prompt_by_group=weights.view(by_group[0], by_group[1], places)[..., : sight.prompt.places],
        suffix_rows=suffix_rows,
        suffix_by_row=suffix_rows.view(by_row[0], by_row[1], sight.suffix.places),
        from_prompt=from_prompt,
        from_prompt_by_group=from_prompt.view(by_group[0], by_group[1], head_dim),
        from_suffix=q_rows.new_empty([by_row[0], by_row[1], head_dim]),
        mixed=mixed,
        mixed_by_row=mixed.view(by_row[0], by_row[1], head_dim),
    )


def attend(scratch: Scratch, layer: LayerCaches, sight: Sight) -> torch.Tensor:
    """(B, H * D): softmax of the queries, as they are now, over [the group's prompt, the row's suffix].

    A row must see at least one place. What a call returns is overwritten by the next one.
    """
    rows, prompt, suffix, grid = scratch.q_rows.shape[0], sight.prompt.places, sight.suffix.places, sight.grid
    keys_BRD = layer.suffix_keys[:rows].flatten(0, 1)[:, :suffix]
    values_BRD = layer.suffix_values[:rows].flatten(0, 1)[:, :suffix]
    scratch.q_rows.copy_(scratch.queries)
    to_cells(scratch.q_rows, scratch.q_cells, grid)
    product_into(scratch.q_by_group, layer.prompt_keys, scratch.to_prompt_by_group)
    prompt_bias = sight.prompt.bias
    if prompt_bias is not None:
        scratch.scores[..., :prompt].add_(prompt_bias.unsqueeze(1))  # as (G, K, N, E, P)
    product_into(scratch.q_by_row, keys_BRD.transpose(1, 2), scratch.suffix_by_row)
    suffix_bias = sight.suffix.bias
    if suffix_bias is not None:
        scratch.suffix_rows.add_(suffix_bias)
    to_cells(scratch.suffix_rows, scratch.scores[..., prompt:], grid)
    if scratch.scores.dtype == torch.float32 or scratch.scores.dtype == torch.float64:
        torch.softmax(scratch.scores, -1, out=scratch.weights)
    else:
        scratch.weights.copy_(scratch.scores.softmax(-1, dtype=torch.float32))
    to_rows(scratch.weights[..., prompt:], scratch.suffix_rows, grid)
    product_into(scratch.over_prompt_by_group, layer.prompt_values, scratch.from_prompt_by_group)
    product_into(scratch.suffix_by_row, values_BRD, scratch.from_suffix)
    to_rows(scratch.from_prompt, scratch.mixed, grid)
    scratch.mixed_by_row.add_(scratch.from_suffix)
    return scratch.mixed.flatten(1)


def store(k_BKD: torch.Tensor, v_BKD: torch.Tensor, layer: LayerCaches, sight: Sight) -> None:
    """Keys and values of the rows' own tokens go where `sight` says."""
    rows, places_B = k_BKD.shape[0], sight.stored_B
    if places_B is None:
        layer.suffix_keys[:rows, :, sight.suffix.places - 1] = k_BKD
        layer.suffix_values[:rows, :, sight.suffix.places - 1] = v_BKD
    else:
        rows_B = torch.arange(rows, device=k_BKD.device)
        layer.suffix_keys[rows_B, :, places_B] = k_BKD
        layer.suffix_values[rows_B, :, places_B] = v_BKD


def to_cells(source: torch.Tensor, target: torch.Tensor, grid: Grid) -> None:
    """Copy (B, K, E, x) to (G, K, N, E, x)."""
    rows_GN = grid.rows_GN
    if rows_GN is not None:
        source = source.index_select(0, rows_GN)
    target.copy_(source.unflatten(0, [grid.groups, grid.width]).transpose(1, 2))


def to_rows(source: torch.Tensor, target: torch.Tensor, grid: Grid) -> None:
    """Copy (G, K, N, E, x) to (B, K, E, x)."""
    cells_B = grid.cells_B
    if cells_B is None:
        target.unflatten(0, [grid.groups, grid.width]).copy_(source.transpose(1, 2))
    else:
        torch.index_select(source.transpose(1, 2).flatten(0, 1), 0, cells_B, out=target)


def bias_where(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(..., 1, 1, places): -inf where `hidden` (..., places) is true, else 0."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return bias.masked_fill_(hidden, float("-inf"))[..., None, None, :]
