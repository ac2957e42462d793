"""How steps are cut: nothing is lost or reordered, budgets hold, and a pack is only closed when it must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.train.microbatch import minibatches, pack_by_tokens, pack_padded

SIZES = st.lists(st.integers(1, 50), max_size=30)


def _padded(lengths: list[int]) -> int:
    return max(lengths) * len(lengths)


@pytest.mark.parametrize(("pack", "cost"), [(pack_by_tokens, sum), (pack_padded, _padded)])
@given(sizes=SIZES, budget=st.integers(1, 120))
def test_packs_are_in_order_within_the_budget_and_as_few_as_that_allows(pack, cost, sizes, budget):
    packs = pack(sizes, budget)
    assert [item for members in packs for item in members] == list(range(len(sizes)))
    costs = [cost([sizes[item] for item in members]) for members in packs]
    assert all(members for members in packs)
    assert all(spent <= budget or len(members) == 1 for spent, members in zip(costs, packs, strict=True))
    for members, following in zip(packs, packs[1:], strict=False):
        assert cost([sizes[item] for item in (*members, following[0])]) > budget


@given(count=st.integers(0, 20), steps=st.integers(1, 8))
def test_minibatches_keep_every_group_in_order_and_are_even(count, steps):
    cut = minibatches(list(range(count)), steps)
    assert [group for part in cut for group in part] == list(range(count))
    assert len(cut) == min(steps, count)
    assert not cut or max(map(len, cut)) - min(map(len, cut)) <= 1
