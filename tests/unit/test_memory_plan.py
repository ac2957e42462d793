"""The memory planner against exhaustive search, and its promises as properties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.errors import ConfigError
from rollplex.memory.plan import MemoryPlan, gib_above, plan_memory, smallest_cap, unplanned
from rollplex.memory.records import Choice, MemoryRecord, ObjectClass, Policy, peaks
from rollplex.memory.timeline import ROLLPLEX, SERIAL, STREAM, STREAM_CLOSED, Timeline
from rollplex.schedule.spec import Phase

GIB = 1 << 30
Records = tuple[MemoryRecord, ...]


@st.composite
def _records(draw: st.DrawFn) -> Records:
    """Up to five objects with up to three ways to hold each: sizes from bytes to tens of GiB."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        size = draw(st.integers(0, 40) | st.integers(0, 40 * GIB))
        uses = sorted(draw(st.sets(st.sampled_from(list(Phase)), min_size=1, max_size=4)), key=list(Phase).index)
        lasting = draw(st.booleans())
        first, last = list(Phase).index(uses[0]), list(Phase).index(uses[-1])
        kept = list(Phase) if lasting else list(Phase)[first : last + 1]
        choices = [Choice(Policy.KEEP, dict.fromkeys(kept, size))]
        for _ in range(draw(st.integers(0, 2))):
            part = draw(st.integers(0, size))
            cost = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
            choices.append(Choice(draw(st.sampled_from(list(Policy)[1:])), dict.fromkeys(uses, part), cost))
        held = tuple(choices)
        found.append(MemoryRecord(f"object {number}", size, ObjectClass.PERMANENT, tuple(uses), lasting, held))
    return tuple(found)


def _every_plan(records: Records, timeline: Timeline) -> list[tuple[int, float, int]]:
    """(peak, seconds, records not kept) of every combination."""
    found = []
    for combination in itertools.product(*(record.choices for record in records)):
        chosen = {record.name: choice for record, choice in zip(records, combination, strict=True)}
        moved = sum(choice.policy is not Policy.KEEP for choice in combination)
        found.append((max(peaks(chosen, records, timeline)), sum(c.restore_s for c in combination), moved))
    return found


@settings(max_examples=60)
@given(_records(), st.sampled_from([SERIAL, ROLLPLEX, STREAM, STREAM_CLOSED]), st.floats(0, 1.2))
def test_plan_is_the_best_of_all(records: Records, timeline: Timeline, share: float) -> None:
    every = _every_plan(records, timeline)
    least = min(peak for peak, _, _ in every)
    cap = round(share * unplanned(records, timeline).peak_bytes)
    fitting = [(seconds, moved) for peak, seconds, moved in every if peak <= cap]
    if not fitting:
        with pytest.raises(ConfigError, match=rf"\({least} bytes\)"):
            plan_memory(records, timeline, cap)
        return
    plan = plan_memory(records, timeline, cap)
    assert plan.peak_bytes <= cap
    moved = sum(choice.policy is not Policy.KEEP for choice in plan.choices.values())
    assert (plan.exposed_s, moved) == min(fitting)


@settings(max_examples=60)
@given(_records(), st.sampled_from([SERIAL, ROLLPLEX, STREAM, STREAM_CLOSED]))
def test_smallest_cap_works_and_one_byte_less_does_not(records: Records, timeline: Timeline) -> None:
    least = smallest_cap(records, timeline)
    assert least.cap_bytes == min(peak for peak, _, _ in _every_plan(records, timeline))
    assert plan_memory(records, timeline, least.cap_bytes).peak_bytes == least.cap_bytes
    assert least.binding and set(least.binding) <= set(timeline.labels)
    with pytest.raises(ConfigError, match=rf"\({least.cap_bytes} bytes\)"):
        plan_memory(records, timeline, least.cap_bytes - 1)


@settings(max_examples=40)
@given(_records(), st.sampled_from([SERIAL, ROLLPLEX, STREAM, STREAM_CLOSED]), st.floats(0, 1))
def test_nothing_is_used_outside_its_residency_and_every_policy_is_needed(
    records: Records, timeline: Timeline, share: float
) -> None:
    least, most = smallest_cap(records, timeline).cap_bytes, unplanned(records, timeline).peak_bytes
    cap = least + math.floor(share * (most - least))
    plan = plan_memory(records, timeline, cap)
    for record in records:
        choice = plan.choices[record.name]
        assert set(record.uses) <= set(choice.held)
        if choice.policy is not Policy.KEEP:
            assert plan.replaced(record.name, record.keep).peak_bytes > cap
    # The peak again, object by object and segment by segment.
    for number, segment in enumerate(timeline.segments):
        total = sum(max(plan.choices[r.name].held.get(p, 0) for p in segment) for r in records)
        assert total == plan.segment_bytes[number] <= cap


def _simple(name: str, size: int, *choices: Choice) -> MemoryRecord:
    keep = Choice(Policy.KEEP, dict.fromkeys(Phase, size))
    return MemoryRecord(name, size, ObjectClass.PERMANENT, (Phase.OPTIMIZER,), True, (keep, *choices))


def test_the_cheaper_of_two_ways_is_taken() -> None:
    stream = Choice(Policy.STREAM, {Phase.OPTIMIZER: 2 * GIB}, restore_s=1.0)
    offload = Choice(Policy.OFFLOAD, {Phase.OPTIMIZER: 10 * GIB}, restore_s=2.0)
    records = (_simple("weights", 5 * GIB), _simple("optimizer state", 10 * GIB, offload, stream))
    assert plan_memory(records, SERIAL, 15 * GIB).exposed_s == 0
    plan = plan_memory(records, SERIAL, 14 * GIB)
    assert plan.choices["optimizer state"].policy is Policy.STREAM
    assert (plan.peak_bytes, plan.exposed_s) == (7 * GIB, 1.0)


def test_infeasible_names_cap_and_phase() -> None:
    records = (_simple("weights", 5 * GIB), _simple("state", 10 * GIB, Choice(Policy.STREAM, {Phase.OPTIMIZER: GIB})))
    with pytest.raises(ConfigError) as caught:
        plan_memory(records, SERIAL, 5 * GIB)
    assert (
        f"fits into 5.00 GiB: the smallest cap that works is 6.00 GiB ({6 * GIB} bytes), where optimizer binds"
        in str(caught.value)
    )


def test_no_records_fit_anywhere() -> None:
    assert plan_memory((), ROLLPLEX, 0) == MemoryPlan(ROLLPLEX, (), {}, (0,) * len(ROLLPLEX.segments))
    assert smallest_cap((), ROLLPLEX).cap_bytes == 0


def test_a_choice_must_hold_the_object_where_it_is_used() -> None:
    bad = Choice(Policy.OFFLOAD, {Phase.DECODE: 4})
    with pytest.raises(ValueError, match="state under offload is absent in optimizer"):
        _simple("state", 4, bad)


@pytest.mark.parametrize("segments", [((Phase.DECODE,),), (tuple(Phase), (Phase.DECODE,)), (tuple(Phase), ())])
def test_a_timeline_has_each_phase_once(segments: Sequence[tuple[Phase, ...]]) -> None:
    with pytest.raises(ValueError, match="every phase in exactly one segment"):
        Timeline("odd", tuple(segments))


@pytest.mark.parametrize(
    ("timeline", "phases", "lasting", "visits"),
    [
        (SERIAL, (Phase.REF_PREFIX, Phase.REF_RESPONSE), True, 2),  # the actor's prefix is between
        (ROLLPLEX, (Phase.REF_PREFIX, Phase.REF_RESPONSE), True, 1),
        (STREAM, (Phase.REF_PREFIX, Phase.REF_RESPONSE), True, 1),
        (STREAM_CLOSED, (Phase.REF_PREFIX, Phase.REF_RESPONSE), True, 1),
        (SERIAL, (Phase.PUBLISH, Phase.PREFILL), True, 1),  # around the end of the step
        (SERIAL, (Phase.PUBLISH, Phase.PREFILL), False, 2),
        (SERIAL, tuple(Phase), True, 0),
    ],
)
def test_visits(timeline: Timeline, phases: tuple[Phase, ...], lasting: bool, visits: int) -> None:
    assert timeline.visits(phases, lasting=lasting) == visits


@given(st.integers(0, 2**50))
def test_a_cap_that_is_said_to_work_works_when_it_is_set(nbytes: int) -> None:
    cap = int(float(gib_above(nbytes)) * GIB)
    assert nbytes <= cap <= nbytes * 1.011 + 1
