"""Attention of one decode step: each row over its group's prompt, held once per group, and over its own suffix.

Functions of tensors alone, in the part of Python that TorchScript reads (uninterrupted.py). All layers of a step share
their buffers, and most views of them are made once a step: a view costs as much as a small operation.

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


class Written(NamedTuple):
    """Where each row's own keys and values go."""

    rows_B: torch.Tensor  # 0, 1, 2, ...
    places_B: torch.Tensor  # in its suffix


class Sight(NamedTuple):
    """What the rows of a step see and write, the same in all layers."""

    prompt: Seen
    suffix: Seen  # this step's token included
    grid: Grid
    written: Written | None = None  # None: all rows write the last place that they see


class LayerCaches(NamedTuple):
    """Keys and values of one layer. Keys carry the root of the score's scaling, as queries do. Suffixes have room for
    more rows and places than are seen."""

    prompt_keys: torch.Tensor  # (G * K, D, P)
    prompt_values: torch.Tensor  # (G * K, P, D)
    suffix_keys: torch.Tensor  # (B or more, K, R or more, D)
    suffix_values: torch.Tensor


class Scratch(NamedTuple):
    """Where the layers of a step attend, one after another: buffers, and views of them under the buffer's name."""

    queries: torch.Tensor  # (B, K, E, D), where each layer's queries will be
    rows: torch.Tensor  # those queries, (B, K, E, D)
    rows_by_head: torch.Tensor  # (B * K, E, D)
    cells: torch.Tensor  # the queries again, (G, K, N, E, D)
    cells_by_head: torch.Tensor  # (G * K, N * E, D): all of a group that read one key/value head
    scores: torch.Tensor  # (G, K, N, E, P + R)
    scores_prompt: torch.Tensor  # (G, K, N, E, P)
    scores_prompt_by_head: torch.Tensor  # (G * K, N * E, P)
    scores_suffix: torch.Tensor  # (G, K, N, E, R)
    weights: torch.Tensor  # (G, K, N, E, P + R)
    weights_prompt_by_head: torch.Tensor  # (G * K, N * E, P)
    weights_suffix: torch.Tensor  # (G, K, N, E, R)
    suffix: torch.Tensor  # scores, then weights, (B, K, E, R)
    suffix_by_head: torch.Tensor  # (B * K, E, R)
    from_prompt: torch.Tensor  # (G, K, N, E, D)
    from_prompt_by_head: torch.Tensor  # (G * K, N * E, D)
    from_suffix_by_head: torch.Tensor  # (B * K, E, D)
    mixed: torch.Tensor  # (B, K, E, D)
    mixed_by_head: torch.Tensor  # (B * K, E, D)
    mixed_BA: torch.Tensor  # (B, K * E * D)


def scratch_for(q_BHD: torch.Tensor, num_kv: int, sight: Sight) -> Scratch:
    """Buffers of one step. q_BHD: where each layer's queries will be."""
    num_rows, head_dim = q_BHD.shape[0], q_BHD.shape[2]
    repeat = q_BHD.shape[1] // num_kv
    prompt, suffix = sight.prompt.places, sight.suffix.places
    groups, width = sight.grid.groups, sight.grid.width
    rows = torch.empty([num_rows, num_kv, repeat, head_dim], dtype=q_BHD.dtype, device=q_BHD.device)
    cells = rows.new_empty([groups, num_kv, width, repeat, head_dim])
    # Scores lie as those of the prompt do, of which there are more: only those of the suffix are moved.
    scores = rows.new_empty([groups, num_kv, width, repeat, prompt + suffix])
    weights = torch.empty_like(scores)
    to_suffix = rows.new_empty([num_rows, num_kv, repeat, suffix])
    from_prompt, mixed = torch.empty_like(cells), torch.empty_like(rows)
    by_group = [groups * num_kv, width * repeat, -1]
    return Scratch(
        queries=q_BHD.unflatten(1, [num_kv, repeat]),
        rows=rows,
        rows_by_head=rows.flatten(0, 1),
        cells=cells,
        cells_by_head=cells.view(by_group),
        scores=scores,
        scores_prompt=scores[..., :prompt],
        scores_prompt_by_head=scores.view(by_group)[..., :prompt],
        scores_suffix=scores[..., prompt:],
        weights=weights,
        weights_prompt_by_head=weights.view(by_group)[..., :prompt],
        weights_suffix=weights[..., prompt:],
        suffix=to_suffix,
        suffix_by_head=to_suffix.flatten(0, 1),
        from_prompt=from_prompt,
        from_prompt_by_head=from_prompt.view(by_group),
        from_suffix_by_head=rows.new_empty([num_rows * num_kv, repeat, head_dim]),
        mixed=mixed,
        mixed_by_head=mixed.flatten(0, 1),
        mixed_BA=mixed.flatten(1),
    )


def attend(scratch: Scratch, layer: LayerCaches, sight: Sight) -> torch.Tensor:
    """(B, H * D): softmax of the queries, as they are now, over [the group's prompt, the row's suffix].

    A row must see at least one place. What a call returns is overwritten by the next one.
    """
    rows, suffix, grid = scratch.rows.shape[0], sight.suffix.places, sight.grid
    prompt_bias, suffix_bias = sight.prompt.bias, sight.suffix.bias
    keys_by_head = layer.suffix_keys[:rows].flatten(0, 1)[:, :suffix]
    values_by_head = layer.suffix_values[:rows].flatten(0, 1)[:, :suffix]
    scratch.rows.copy_(scratch.queries)
    to_cells(scratch.rows, scratch.cells, grid)
    product_into(scratch.cells_by_head, layer.prompt_keys, scratch.scores_prompt_by_head)
    if prompt_bias is not None:
        scratch.scores_prompt.add_(prompt_bias.unsqueeze(1))  # as (G, K, N, E, P)
    product_into(scratch.rows_by_head, keys_by_head.transpose(1, 2), scratch.suffix_by_head)
    if suffix_bias is not None:
        scratch.suffix.add_(suffix_bias)
    to_cells(scratch.suffix, scratch.scores_suffix, grid)
    if scratch.scores.dtype == torch.float32 or scratch.scores.dtype == torch.float64:
        torch.softmax(scratch.scores, -1, out=scratch.weights)
    else:
        scratch.weights.copy_(scratch.scores.softmax(-1, dtype=torch.float32))
    to_rows(scratch.weights_suffix, scratch.suffix, grid)
    product_into(scratch.weights_prompt_by_head, layer.prompt_values, scratch.from_prompt_by_head)
    product_into(scratch.suffix_by_head, values_by_head, scratch.from_suffix_by_head)
    to_rows(scratch.from_prompt, scratch.mixed, grid)
    torch.add(scratch.mixed_by_head, scratch.from_suffix_by_head, out=scratch.mixed_by_head)
    return scratch.mixed_BA


def store(k_BKD: torch.Tensor, v_BKD: torch.Tensor, layer: LayerCaches, sight: Sight) -> None:
    """Keys and values of the rows' own tokens go where `sight` says."""
    rows, written = k_BKD.shape[0], sight.written
    if written is None:
        layer.suffix_keys[:rows, :, sight.suffix.places - 1] = k_BKD
        layer.suffix_values[:rows, :, sight.suffix.places - 1] = v_BKD
    else:
        layer.suffix_keys[written.rows_B, :, written.places_B] = k_BKD
        layer.suffix_values[written.rows_B, :, written.places_B] = v_BKD


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
