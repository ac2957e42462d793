"""Shapes of decode steps: whatever is needed fits, padding is bounded, and there are few of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollplex.rollout.decode_buckets import (
    LEAST_PLACES,
    MOST_WASTE,
    Bucket,
    Limits,
    fitting,
    next_bucket,
    rounded,
    table,
    widest,
)

COUNTS = st.integers(1, 100_000)


@st.composite
def _cases(draw: st.DrawFn, length: int = 1) -> tuple[Limits, list[Bucket]]:
    """Limits of an engine, and what some of its steps need."""
    limits = Limits(draw(st.integers(1, 300)), draw(st.integers(1, 40)), draw(st.integers(1, 3000)))
    needs = []
    for _ in range(length):
        rows = draw(st.integers(1, limits.rows))
        width = draw(st.integers(1, min(rows, limits.width)))
        fewest = -(-rows // width)
        groups = draw(st.integers(fewest, max(fewest, rows - width + 1)))
        needs.append(Bucket(rows, groups, width, draw(st.integers(1, 20_000)), draw(st.integers(1, limits.suffix))))
    return limits, needs


@given(count=COUNTS, least=st.sampled_from([1, 2, 64, 1024]), parts=st.sampled_from([1, 2, 4]))
def test_rounding_goes_up_by_a_bounded_factor(count: int, least: int, parts: int) -> None:
    found = rounded(count, least=least, parts=parts)
    assert found >= max(count, least)
    assert found < (1 + 1 / parts) * count or found == max(count, least)
    assert rounded(found, least=least, parts=parts) == found
    assert rounded(count + 1, least=least, parts=parts) >= found


@given(least=st.sampled_from([1, 64]), parts=st.sampled_from([1, 4]), octaves=st.integers(1, 8))
def test_there_are_as_many_sizes_as_parts_of_octaves(least: int, parts: int, octaves: int) -> None:
    sizes = {rounded(count, least=least, parts=parts) for count in range(1, (least << octaves) + 1)}
    assert len(sizes) <= 1 + parts * octaves


@given(case=_cases())
def test_the_smallest_bucket_holds_its_need_within_the_limits(case: tuple[Limits, list[Bucket]]) -> None:
    limits, (need,) = case
    found = fitting(need, limits)
    assert found.holds(need) and found.holds(found) and fitting(found, limits) == found
    assert (found.rows <= limits.rows, found.width <= limits.width, found.suffix <= limits.suffix) == (True,) * 3
    for name, padded in (("rows", found.rows), ("groups", found.groups), ("width", found.width)):
        assert padded < 2 * getattr(need, name) or padded == 1
    assert found.prompt < 1.25 * max(need.prompt, LEAST_PLACES) or found.prompt == LEAST_PLACES
    assert found.suffix < 2 * max(need.suffix, LEAST_PLACES)


@given(case=_cases(length=12))
def test_a_bucket_stays_while_it_fits_and_is_not_wasteful(case: tuple[Limits, list[Bucket]]) -> None:
    limits, needs = case
    current = None
    for need in needs:
        before, smallest = current, fitting(need, limits)
        current = next_bucket(current, need, limits)
        assert current.holds(need) and current in (before, smallest)
        assert current.rows <= MOST_WASTE * smallest.rows
        assert current.places_read <= MOST_WASTE * smallest.places_read


def test_a_rollout_takes_few_buckets() -> None:
    """256 rows of 32 prompts, all of which decode 64 tokens and half of the rest another 64, and so on."""
    limits, current, seen = Limits(256, 8, 4096), None, set()
    for token in range(4096):
        live = max(1, 256 >> token // 64)
        groups = -(-live // 8)
        current = next_bucket(current, Bucket(live, groups, min(live, 8), 2704, token + 1), limits)
        seen.add(current)
    assert len(seen) <= 16


@given(data=st.data(), groups=st.integers(1, 9))
def test_a_table_has_each_row_in_a_cell_of_its_group(data: st.DataObject, groups: int) -> None:
    slots = data.draw(st.lists(st.integers(0, groups - 1), min_size=1, max_size=40))
    width = widest(slots) + data.draw(st.integers(0, 3))
    rows, cells = table(slots, groups, width)
    assert len(rows) == groups * width and len(set(cells)) == len(slots)
    for row, (slot, cell) in enumerate(zip(slots, cells, strict=True)):
        assert rows[cell] == row and cell // width == slot
    assert all(rows[cell] == 0 for cell in set(range(len(rows))) - set(cells))
