"""The engine in virtual time, against decoding that is summed up at once, and against its own formula cut to pieces."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.planner.decoding import Rows, decode_ends
from rollplex.planner.engine import Engine, StepTable
from rollplex.planner.load import GroupLoad, Prompt


def _step(rows: Rows) -> float:
    """Linear in contexts, and in rows with a kink, as weights and products are."""
    return max(1.0, 0.05 * rows.rows) + 1e-4 * rows.cached_tokens + 1e-5 * rows.pairs


def _table(step=_step) -> StepTable:
    return StepTable(step, context_tokens=500.0, read_tokens=100.0)


def _run(engine: Engine, pieces: int = 1) -> dict[object, float]:
    """End of each key, every stretch cut into `pieces`."""
    now, ends = 0.0, {}
    while (wait := engine.until_next()) < math.inf:
        for _ in range(pieces - 1):
            engine.advance(wait / pieces)
        now += wait
        if (key := engine.end_next()) is not None:
            ends[key] = now
    return ends


_lengths = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=100)
@given(lengths=_lengths, shared=st.booleans(), places=st.none() | st.integers(1, 8), pieces=st.sampled_from([1, 3]))
def test_ends_are_those_of_the_closed_form(
    lengths: list[list[int]], shared: bool, places: int | None, pieces: int
) -> None:
    groups = [GroupLoad(Prompt(10 + 7 * i), tuple(row)) for i, row in enumerate(lengths)]
    engine = Engine(_table(), places=places, shared_prompts=shared)
    for number, group in enumerate(groups):
        engine.decode(number, group)
    ends = _run(engine, pieces)
    wanted = decode_ends(groups, _step, shared_prompts=shared, max_rows=places).groups
    assert [ends[number] for number in range(len(groups))] == pytest.approx(wanted)
    assert not engine.active
    assert (engine._pairs, engine._cached) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_group_that_joins_slows_the_others_from_then_on() -> None:
    """One row at 1 s a step for 10 steps; after 4 s a second one comes, and a step takes 3 s: 4 + 6 x 3."""
    table = StepTable(lambda rows: {1: 1.0, 2: 3.0}[rows.rows], context_tokens=10)
    engine = Engine(table)
    engine.decode("first", GroupLoad(Prompt(5), (11,)))
    engine.advance(4.0)
    engine.decode("second", GroupLoad(Prompt(5), (11,)))
    assert engine.until_next() == pytest.approx(18.0)
    assert engine.end_next() == "first"
    assert engine.until_next() == pytest.approx(4.0)  # 6 of its 10 steps are done, alone again for the rest


def test_taking_in_a_prompt_holds_up_decoding() -> None:
    engine = Engine(StepTable(lambda rows: 1.0, context_tokens=10))
    engine.decode("group", GroupLoad(Prompt(5), (5,)))
    engine.advance(1.0)
    engine.prefill("prompt", 10.0)
    engine.advance(4.0)
    assert (engine.until_next(), engine.end_next()) == (6.0, "prompt")
    assert (engine.until_next(), engine.end_next()) == (3.0, "group")


def test_a_group_of_single_tokens_ends_at_once() -> None:
    engine = Engine(_table())
    engine.decode("group", GroupLoad(Prompt(5), (1, 1)))
    assert engine.active and (engine.until_next(), engine.end_next()) == (0.0, "group")
    assert not engine.active and engine.until_next() == math.inf


def test_the_line_of_a_table_is_the_step_on_its_side_of_the_kink() -> None:
    def step(rows: Rows) -> float:
        return 2.0 + max(3e-4 * rows.pairs, 1e-3 * rows.cached_tokens)

    reading = StepTable(step, context_tokens=1000, read_tokens=900).of(4)
    assert reading == pytest.approx((2.0, 0.0, 1e-3))
    computing = StepTable(step, context_tokens=1000, read_tokens=100).of(4)
    assert computing == pytest.approx((2.0, 3e-4, 0.0))
    both = StepTable(lambda rows: 2.0 + max(rows.pairs, rows.cached_tokens), context_tokens=8).of(2)
    assert both == pytest.approx((2.0, 0.0, 1.0))


def test_scattered_rows_of_a_group_are_further_apart() -> None:
    """Eight groups of four rows in four places: in order, one group after the other; scattered, they end later."""

    def ends(scatter: float) -> list[float]:
        engine = Engine(StepTable(lambda rows: 1.0, context_tokens=10), places=4, scatter=scatter, seed=1)
        engine.prefill("prompts", 1.0)  # all wait, as requests that come at once
        for number in range(8):
            engine.decode(number, GroupLoad(Prompt(5), (11,) * 4))
        found = _run(engine)
        return [found[number] for number in range(8)]

    assert ends(0.0) == pytest.approx([1.0 + 10.0 * (number + 1) for number in range(8)])
    scattered = ends(32.0)
    assert max(scattered) == pytest.approx(81.0)  # the same work
    assert min(scattered) > 11.0 and sum(scattered) > sum(ends(0.0))
