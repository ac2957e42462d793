"""When responses end, against decoding step by step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from rollplex.planner.decoding import Rows, decode_ends
from rollplex.planner.load import GroupLoad, Prompt


def _step(rows: Rows) -> float:
    return 1.0 + 0.01 * rows.rows + 1e-4 * rows.cached_tokens + 1e-5 * rows.pairs + 0.1 * rows.prompts


def _one_by_one(groups: list[GroupLoad], shared: bool, places: int) -> list[list[float]]:
    waiting = [(g, r) for g, group in enumerate(groups) for r in range(len(group.responses))]
    live: dict[tuple[int, int], int] = {}
    ends = [[0.0] * len(group.responses) for group in groups]
    now = 0.0
    while waiting or live:
        while waiting and len(live) < places:
            g, r = waiting.pop(0)
            if groups[g].responses[r] > 1:
                live[g, r] = 0
            else:
                ends[g][r] = now
        if not live:
            continue
        prompts = {g for g, _ in live}
        own = sum(done + 1 for done in live.values())
        repeated = sum(groups[g].prompt.tokens for g, _ in live)
        read = sum(groups[g].prompt.tokens for g in prompts) if shared else repeated
        now += _step(Rows(len(live), len(prompts), repeated + own, read + own))
        for key in list(live):
            live[key] += 1
            if live[key] == groups[key[0]].responses[key[1]] - 1:
                ends[key[0]][key[1]] = now
                del live[key]
    return ends


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=5),
    shared=st.booleans(),
    places=st.integers(1, 8),
)
def test_ends_are_those_of_every_step(lengths: list[list[int]], shared: bool, places: int) -> None:
    groups = [GroupLoad(Prompt(10 + 7 * i), tuple(row)) for i, row in enumerate(lengths)]
    found = decode_ends(groups, _step, shared_prompts=shared, max_rows=places)
    wanted = _one_by_one(groups, shared, places)
    assert [end for row in found.responses for end in row] == approx([end for row in wanted for end in row])
    assert list(found.groups) == approx([max(row) for row in wanted])


def test_a_first_token_needs_no_step() -> None:
    assert decode_ends([GroupLoad(Prompt(5), (1, 1))], _step, shared_prompts=True).groups == (0.0,)


def test_reading_a_prompt_once_for_its_group_is_faster() -> None:
    groups = [GroupLoad(Prompt(5000), (50,) * 8)]
    once, each = (decode_ends(groups, _step, shared_prompts=shared).groups[0] for shared in (True, False))
    assert each - once == approx(49 * 7 * 5000 * 1e-4)
