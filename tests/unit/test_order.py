"""Data order: a pure function of the position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.tasks.order import DataOrder


@given(st.integers(1, 60), st.integers(0, 5), st.booleans(), st.integers(0, 4))
def test_each_epoch_visits_each_row_once(rows, seed, shuffle, epoch):
    order = DataOrder(rows, seed, shuffle)
    assert sorted(order.row_at(epoch * rows + i) for i in range(rows)) == list(range(rows))


def test_shuffling_depends_on_seed_and_epoch_only():
    first = [DataOrder(50, 1, True).row_at(i) for i in range(100)]
    again = [DataOrder(50, 1, True).row_at(i) for i in reversed(range(100))][::-1]
    other = [DataOrder(50, 2, True).row_at(i) for i in range(100)]
    assert first == again
    assert first != other and first[:50] != first[50:]


def test_unshuffled_order_and_epochs():
    order = DataOrder(4, 0, False)
    assert [order.row_at(i) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert order.epochs_at(6) == 1.5
    with pytest.raises(ValueError, match="at least 1"):
        DataOrder(0, 0, True)
