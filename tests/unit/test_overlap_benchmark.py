"""The shares of a bound that benchmarks/overlap_shares.py states: by steps, with an interval that noise widens."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise, permutations

import numpy as np
import pytest

from overlap import Arm, in_turn, paired
from overlap_shares import (
    Step,
    alike,
    alone_seconds,
    bounds,
    share_of_bound,
    slowdown_by_pass,
    slowness,
    with_pass_beside,
)
from rollplex.trace import Span


def test_steps_that_hide_all_their_bounds_have_the_whole_share_whatever_the_bounds() -> None:
    bounds_s = np.array([0.1, 0.9, 0.4, 0.5, 0.2])
    assert share_of_bound(bounds_s, bounds_s) == pytest.approx((1.0, 1.0, 1.0))


def test_half_of_each_bound_is_half_a_share() -> None:
    bounds_s = np.full(9, 0.4)
    assert share_of_bound(bounds_s / 2, bounds_s) == pytest.approx((0.5, 0.5, 0.5))


def test_noise_widens_the_interval_around_the_share() -> None:
    rng = np.random.default_rng(1)
    bounds_s, quiet, loud = np.full(25, 0.5), rng.normal(0, 0.01, 25), rng.normal(0, 0.5, 25)
    near, far = share_of_bound(bounds_s + quiet, bounds_s), share_of_bound(bounds_s + loud, bounds_s)
    assert near[1] <= near[0] <= near[2]
    assert far[2] - far[1] > 10 * (near[2] - near[1])


def test_what_both_arms_did_alone_is_matched_by_phase_and_unit() -> None:
    def span(name: str, lane: str, seconds: float, group: int | None) -> Span:
        return Span(name, lane, 1.0, 1.0 + seconds, 0, group)

    spans = [span("prefill", "main", 0.5, 4), span("prefill", "main", 0.25, 5), span("ref_prefix", "window", 1.0, 4)]
    spans += [span("decode", "decode", 2.0, 4), span("optimizer", "main", 0.125, None)]
    assert alone_seconds(spans) == {("prefill", 4): 0.5, ("prefill", 5): 0.25, ("optimizer", None): 0.125}


def test_steps_are_compared_by_round_and_rounds_that_one_arm_lacks_are_left_out() -> None:
    one, other = Arm("one"), Arm("other")
    one.steps = {number: Step(float(number), 0.0, 0.0, ()) for number in (2, 0, 1)}
    other.steps = {number: Step(number + 0.5, 0.0, 0.0, ()) for number in (1, 2, 3)}
    assert [(a.seconds, b.seconds) for a, b in paired(one, other)] == [(1.0, 1.5), (2.0, 2.5)]


def test_slowness_compares_medians_of_the_same_steps_and_leaves_out_what_ran_beside_decoding() -> None:
    def step(alone_s: float) -> Step:
        return Step(
            0.0, 0.0, 0.0, (Span("prefill", "main", 0.0, alone_s, 1), Span("ref_prefix", "window", 0.0, 1.0, 1))
        )

    assert slowness([(step(1.0), step(1.5)), (step(2.0), step(3.0)), (step(4.0), step(9.0))]) == {"prefill": 1.5}


def test_a_unit_of_several_prompts_can_stream_when_its_last_group_is_complete() -> None:
    def span(name: str, lane: str, start_s: float, end_s: float, group: int) -> Span:
        return Span(name, lane, start_s, end_s, 0, group)

    decodes = [span("decode", "decode", 1.0, 1.0 + end_s, group) for group, end_s in ((4, 1.0), (5, 6.0), (6, 2.0))]
    main = [span("ref_prefix", "main", 0.0, 1.0, unit) for unit in (4, 6)]
    main += [span("ref_response", "main", 8.0, 10.0, unit) for unit in (4, 6)]
    step = Step(20.0, 6.0, 0.0, (*decodes, *main))
    slow = {"ref_prefix": 1.5, "ref_response": 2.0}
    # Prefixes until 3.0; the unit of prompt 6 streams from then on: 3 of the 4 s that it takes on one core, until 6.0,
    # when the unit of prompts 4 and 5 is complete and nothing decodes any more.
    assert bounds([step], slow, streaming=False).tolist() == [2.0]
    assert bounds([step], slow, streaming=True).tolist() == [2.0 + 1.5]


def test_iterations_are_alike_where_neither_arm_had_a_pass_beside_them_or_just_before() -> None:
    def step(seconds: list[float], window: tuple[float, float] | None) -> Step:
        ends = list(accumulate(seconds, initial=0.0))
        spans = (Span("prefill", "main", 9.0, 9.5 if window else 9.25, 1, 0),)
        if window:
            spans += (Span("ref_prefix", "window", *window, 1, 0),)
        return Step(0.0, 0.0, 0.0, spans, tuple(pairwise(ends)))

    serial, hiding = step([1.0, 1.0, 1.0, 1.0, 1.0], None), step([1.0, 2.0, 2.0, 1.5, 0.75], (1.5, 2.5))
    assert with_pass_beside(hiding) == {1, 2} and with_pass_beside(serial) == set()
    # prefill was 0.25 s slower, iterations 0, 3 and 4 by 0, 0.5 and -0.25
    assert alike([(serial, hiding)]).tolist() == [-0.25 - 0.25]
    long = step([1.0, 2.0, 2.0, 1.5, 0.75], (1.0, 5.5))  # beside the second and the third from begin to end
    assert slowdown_by_pass([(serial, hiding)]) == {} and slowdown_by_pass([(serial, long)]) == {"ref_prefix": 2.0}


def test_every_arm_is_equally_often_in_each_place_and_of_up_to_three_behind_each_other_one() -> None:
    for names in (["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]):
        rounds = [in_turn(names, number) for number in range(2 * len(names))]
        assert all(sorted(order) == names for order in rounds)
        places = Counter((place, name) for order in rounds for place, name in enumerate(order))
        assert set(places.values()) == {2} and len(places) == len(names) ** 2
        behind = Counter(pair for order in rounds for pair in pairwise(order))
        if len(names) <= 3:
            assert len({behind[pair] for pair in permutations(names, 2)}) == 1
