"""A plan is carried out: what a phase uses is there, what the plan holds nowhere near is away."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import StateError
from rollplex.memory.host_copies import HostCopies
from rollplex.memory.plan import plan_memory, unplanned
from rollplex.memory.records import Choice, MemoryRecord, ObjectClass, Policy
from rollplex.memory.residency import Residency
from rollplex.memory.timeline import ROLLPLEX, SERIAL, STREAM, STREAM_CLOSED, Timeline
from rollplex.schedule.spec import Phase

USES = (Phase.REF_PREFIX, Phase.REF_RESPONSE)


def _record(timeline: Timeline) -> MemoryRecord:
    around = {p: 100 for number in timeline.positions(USES) for p in timeline.segments[number]}
    keep, away = Choice(Policy.KEEP, dict.fromkeys(Phase, 100)), Choice(Policy.OFFLOAD, around, 1.0)
    return MemoryRecord("reference weights", 100, ObjectClass.PERMANENT, USES, True, (keep, away))


def _residency(timeline: Timeline, kind: type[HostCopies] = HostCopies) -> tuple[Residency, HostCopies]:
    blocker = Choice(Policy.KEEP, {Phase.OPTIMIZER: 50})
    other = MemoryRecord("gradients", 50, ObjectClass.PHASE_LOCAL, (Phase.OPTIMIZER,), False, (blocker,))
    plan = plan_memory((_record(timeline), other), timeline, 100)
    assert plan.choices["reference weights"].policy is Policy.OFFLOAD
    copies = kind("reference weights", [torch.ones(25)], read_only=True)
    return Residency(plan, {"reference weights": copies}), copies


@pytest.mark.parametrize("timeline", [SERIAL, ROLLPLEX, STREAM, STREAM_CLOSED], ids=lambda timeline: timeline.name)
def test_two_steps_find_what_they_use_and_free_what_the_plan_frees(timeline: Timeline) -> None:
    residency, copies = _residency(timeline)
    assert not copies.on_device  # steps begin without it
    held = _record(timeline).choices[1].held
    for phase in (*Phase, *Phase):
        with residency.during(phase):
            if phase in USES:
                assert copies.on_device
            if not held.get(phase):
                assert not copies.on_device


@given(st.lists(st.sampled_from(list(Phase)), min_size=1, max_size=12))
def test_phases_of_two_lanes_never_take_it_from_each_other(phases: list[Phase]) -> None:
    residency, copies = _residency(SERIAL)
    with ExitStack() as stack:
        used = False
        for phase in phases:
            stack.enter_context(residency.during(phase))
            used = used or phase in USES
            assert copies.on_device or not used
    with residency.during(Phase.OPTIMIZER):
        assert not copies.on_device


def test_an_object_that_the_plan_does_not_know_is_refused() -> None:
    plan = unplanned((_record(SERIAL),), SERIAL)
    with pytest.raises(StateError, match=r"no records of these names in the memory plan: \['kv'\]"):
        Residency(plan, {"kv": HostCopies("kv", [torch.ones(1)])})


class OnAFullDevice(HostCopies):
    """Finds no room the first time that it is to come back."""

    failed = False

    def bring_back(self) -> None:
        if not self.failed:
            self.failed = True
            raise MemoryError("no room on the device")
        super().bring_back()


def test_a_phase_that_could_not_begin_holds_nothing_on_the_device() -> None:
    residency, copies = _residency(SERIAL, OnAFullDevice)
    with residency.during(Phase.OPTIMIZER):
        assert not copies.on_device
    with pytest.raises(MemoryError), residency.during(Phase.REF_PREFIX):
        pytest.fail("it is not there")
    with residency.during(Phase.REF_PREFIX):
        assert copies.on_device
    with residency.during(Phase.OPTIMIZER):
        assert not copies.on_device
