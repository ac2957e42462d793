"""Allocations are counted as they happen, in every thread that says so; the ledger sets them beside the plan."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from rollplex.memory import allocations
from rollplex.memory.allocations import AllocationCounter, MemoryTrace, held_bytes
from rollplex.memory.ledger import ledger_of
from rollplex.memory.plan import unplanned
from rollplex.memory.records import Choice, MemoryRecord, ObjectClass, Policy
from rollplex.memory.timeline import SERIAL
from rollplex.schedule.spec import Phase

CPU = torch.device("cpu")
MIB = 1 << 20


def _mib(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


def test_the_peak_is_that_of_what_was_held_at_once() -> None:
    counter = AllocationCounter(CPU, lambda: 10 * MIB)
    with counter.counting():
        first = _mib(3)
        second = _mib(5)
        del first
        third = _mib(1)
        del second
    trace = counter.trace()
    assert trace.peak_bytes == 18 * MIB and trace.left_bytes == MIB
    assert third.numel() == MIB


def test_threads_that_count_are_added_up_and_others_are_not() -> None:
    counter = AllocationCounter(CPU)
    both, done = threading.Barrier(2, timeout=120), threading.Barrier(2, timeout=120)

    def beside() -> None:
        with counter.counting():
            held = _mib(7)
            both.wait()
            done.wait()
            del held

    thread = threading.Thread(target=beside)
    uncounted = threading.Thread(target=_mib, args=(50,))
    with counter.counting():
        thread.start()
        uncounted.start()
        uncounted.join()
        both.wait()
        held = _mib(2)
        done.wait()
        thread.join()
    assert counter.trace().peak_bytes == 9 * MIB and held.numel() == 2 * MIB


def test_backward_counts() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)
    counter = AllocationCounter(CPU)
    with counter.counting():
        weight.exp().exp().sum().backward()
    assert counter.trace().left_bytes == MIB  # the gradient
    assert counter.trace().peak_bytes >= 3 * MIB  # two saved results and a gradient


@pytest.mark.parametrize("late", ["_enable_profiler_legacy", "_disable_profiler_legacy"])
def test_times_hold_though_the_thread_is_put_aside_beside_the_profiler(
    late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, really = AllocationCounter(CPU, to_epoch_s=1000.0), getattr(allocations, late)

    def put_aside(*args: object) -> object:
        time.sleep(2.0)
        answer = really(*args)
        time.sleep(2.0)
        return answer

    monkeypatch.setattr(allocations, late, put_aside)
    with counter.counting():
        before_s = time.monotonic()
        held = _mib(1)
        after_s = time.monotonic()
    times_s, level = counter.trace().times_s, counter.trace().level
    assert level == (0, MIB) and held.numel() == MIB
    assert before_s - 1.0 <= times_s[1] - 1000.0 <= after_s + 1.0
    assert times_s[0] <= times_s[1]


def test_garbage_from_before_is_not_counted_as_released() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own, self.held = self, _mib(7)

    before = AllocationCounter(CPU)
    gc.disable()  # only the collections of this test
    try:
        with before.counting():
            Ring()
        counter = AllocationCounter(CPU)
        with counter.counting():
            held = _mib(2)
            gc.collect()
    finally:
        gc.enable()
    assert before.trace().left_bytes == 7 * MIB
    assert counter.trace().level == (0, 2 * MIB) and held.numel() == 2 * MIB


def test_storages_count_once() -> None:
    whole = torch.zeros(10)
    assert held_bytes([whole, whole[:3], whole.view(2, 5), torch.zeros(1, dtype=torch.int64)], CPU) == 48


def test_a_peak_within_a_time_looks_at_what_was_held_when_it_began() -> None:
    trace = MemoryTrace((0.0, 1.0, 2.0, 3.0), (5, 9, 1, 4))
    assert trace.peak_within(0.5, 0.6) == 5
    assert trace.peak_within(0.5, 1.5) == 9
    assert trace.peak_within(1.5, 2.5) == 9
    assert trace.peak_within(2.0, 2.5) == 1
    assert trace.peak_within(2.5, 9.0) == 4


def test_the_ledger_sets_segments_side_by_side() -> None:
    keep = Choice(Policy.KEEP, {Phase.DECODE: 4 * MIB, Phase.OPTIMIZER: 2 * MIB})
    record = MemoryRecord("a", 4 * MIB, ObjectClass.PHASE_LOCAL, (Phase.DECODE, Phase.OPTIMIZER), False, (keep,))
    ledger = ledger_of(unplanned((record,), SERIAL), {Phase.DECODE: 5 * MIB}, 6 * MIB, 7)
    assert ledger.measured_over_planned == pytest.approx(1.5) and ledger.left_bytes == 7
    by_phase = {entry.phases: entry for entry in ledger.entries}
    assert by_phase["decode"].measured_over_planned == pytest.approx(1.25)
    assert by_phase["optimizer"].measured_bytes is None
    assert ledger.metrics()["memory/measured_peak_gib"] == pytest.approx(6 / 1024)
    text = "\n".join(ledger.lines())
    assert "4.0       5.0   1.25  decode" in text and "6.0   1.50  peak of the step" in text


def test_events_of_threads_that_autograd_started_count_with_those_of_the_thread_that_asked(monkeypatch) -> None:
    """On a GPU backwards run in threads of autograd, whose events come in a list of their own, without marks."""
    whole = allocations._disable_profiler_legacy

    def as_on_a_gpu():
        [events] = whole()
        memory = [event for event in events if str(event.kind()) == "memory_alloc"]
        return [memory[1:], [event for event in events if event not in memory[1:]]]

    monkeypatch.setattr(allocations, "_disable_profiler_legacy", as_on_a_gpu)
    counter = AllocationCounter(CPU)
    with counter.counting():
        first, second = _mib(3), _mib(5)
        del first
    assert counter.trace().peak_bytes == 8 * MIB and counter.trace().left_bytes == 5 * MIB
    assert second.numel() == 5 * MIB
