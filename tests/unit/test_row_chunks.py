"""Cuts of a prompt pass: every row once and in order, none over the limit, as even as can be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right

from rollplex.models.row_chunks import RowChunks, equal_runs, even_parts, joined

LENGTHS = st.lists(st.sampled_from([1, 2, 3, 7, 8, 20]), min_size=1, max_size=6)
LIMITS = st.one_of(st.none(), st.integers(1, 60))
LIKE = torch.zeros(0, dtype=torch.float64)


def test_equal_runs() -> None:
    assert equal_runs([5, 5, 7, 5]) == [(5, 2), (7, 1), (5, 1)]


@given(total=st.integers(1, 2000), limit=LIMITS)
def test_parts_are_few_even_and_within_the_limit(total: int, limit: int | None) -> None:
    parts = even_parts(total, limit)
    assert sum(parts) == total and min(parts) >= 1
    assert max(parts) - min(parts) <= 1
    if limit is None:
        assert parts == [total]
    else:
        assert max(parts) <= limit
        assert (len(parts) - 1) * limit < total  # one part fewer would not do


@given(lengths=LENGTHS, limit=LIMITS)
def test_chunks_hold_every_row_once_and_in_order(lengths: list[int], limit: int | None) -> None:
    numbers = torch.arange(sum(lengths))
    pieces = list(RowChunks.of(lengths, limit, LIKE).rows(numbers, 10 * numbers))
    assert joined([first for first, _ in pieces]).equal(numbers)
    assert joined([second for _, second in pieces]).equal(10 * numbers)
    assert limit is None or max(len(first) for first, _ in pieces) <= limit


@given(lengths=LENGTHS, limit=LIMITS)
def test_prompts_share_a_call_within_the_limit(lengths: list[int], limit: int | None) -> None:
    runs = RowChunks.of(lengths, limit, LIKE).runs()
    assert [length for length, count in runs for _ in range(count)] == lengths
    if limit is None:
        assert runs == equal_runs(lengths)
    else:
        assert all(count == 1 or length * count <= limit for length, count in runs)


@given(lengths=LENGTHS, limit=st.integers(1, 19))
def test_masks_are_causal_from_the_last_key_back(lengths: list[int], limit: int) -> None:
    """The band's views, and the shape that kernels of a GPU know by name."""
    chunks = RowChunks.of(lengths, limit, LIKE)
    named = RowChunks(chunks.lengths, limit, None)
    for length in {length for length in lengths if length > limit}:
        keys = 0
        for queries in even_parts(length, limit):
            keys += queries
            scores = torch.arange(queries)[:, None] + keys - queries < torch.arange(keys)[None, :]
            wanted = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(scores, float("-inf"))
            assert torch.equal(chunks.mask(queries, keys), wanted)
            mask = named.mask(queries, keys)
            assert isinstance(mask, type(causal_lower_right(1, 1)))
            assert torch.equal(mask._materialize(), ~scores)


@pytest.mark.parametrize("limit", [None, 8, 100])
def test_nothing_is_made_where_no_prompt_is_cut(limit: int | None) -> None:
    assert RowChunks.of([8, 5], limit, LIKE).band is None


def test_a_whole_pass_is_neither_viewed_nor_copied() -> None:
    rows = torch.randn(5, 2)
    for limit in (None, 5):
        ((same,),) = RowChunks.of([2, 3], limit, LIKE).rows(rows)
        assert same is rows and joined([same]) is rows
