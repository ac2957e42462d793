"""Schedules in virtual time: as the scripted executor where nothing depends on the load; contention; whole runs."""

from __future__ import annotations

import gc
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.errors import ConfigError, StateError
from rollplex.planner.engine import Engine, StepTable
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.simulate import Layout, simulate
from rollplex.planner.virtual import VirtualExecutor
from rollplex.schedule.pools import Disaggregated, RolloutPipe
from rollplex.schedule.registry import POOL_SCHEDULES, SCHEDULES, schedule_named
from rollplex.schedule.run import Async
from rollplex.schedule.scripted import ScriptedExecutor
from rollplex.schedule.spec import Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, run_step
from simulation_speed import FEED, SECONDS, decode_table, measure


def _simulate(name: str, groups: int, layout: Layout, **options):
    schedule = Async() if name == "async" else schedule_named(name)
    spec = StepSpec(num_groups=groups, reference=True)
    seconds = options.pop("seconds", lambda phase, load: SECONDS[phase])
    return simulate(schedule, spec, FEED, layout, seconds=seconds, table=decode_table(), **options)


@settings(max_examples=40)
@given(st.data(), st.sampled_from([*SCHEDULES, *POOL_SCHEDULES]), st.integers(1, 5))
def test_as_the_scripted_executor_where_each_group_has_an_engine(data: st.DataObject, name: str, count: int) -> None:
    """An engine each, a row each, a second a step: DECODE then takes a fixed time, and both clocks must agree. No two
    tasks end at once: either order would be right then, and schedules may go on differently."""
    spec = StepSpec(num_groups=count, reference=data.draw(st.booleans()))
    whole = data.draw(st.fixed_dictionaries({task: st.integers(1, 9) for task in spec.tasks}))
    seconds = {
        task: float(n) if task.phase is Phase.DECODE else n + (number + 1) * 0.6180339887498949 % 1
        for number, (task, n) in enumerate(whole.items())
    }
    limits = Limits(main=data.draw(st.integers(1, 2)), window=data.draw(st.integers(0, 2)))
    loads = [GroupLoad(Prompt(3), (int(seconds[Task(Phase.DECODE, g)]) + 1,)) for g in range(count)]
    scripted = ScriptedExecutor(seconds.__getitem__, limits=limits)
    engines = [Engine(StepTable(lambda rows: 1.0, context_tokens=9)) for _ in range(count)]
    virtual = VirtualExecutor(lambda step, task: seconds[task], lambda step: loads, engines)
    for executor in (scripted, virtual.of_step(0)):
        run_step(schedule_named(name), executor, spec, limits)
    assert virtual.now_s == pytest.approx(scripted.now_s)
    found, wanted = ({(s.name, s.group): (s.start_s, s.end_s, s.lane) for s in e.spans} for e in (virtual, scripted))
    assert found.keys() == wanted.keys()
    for key, (start_s, end_s, lane) in wanted.items():
        assert found[key][:2] == pytest.approx((start_s, end_s)) and found[key][2] == lane


def _beside(contention: float, decode_steps: int, window_s: float) -> tuple[float, float]:
    """Ends of a group of one row and of a pass in the window that start together."""
    executor = VirtualExecutor(
        lambda step, task: window_s,
        lambda step: [GroupLoad(Prompt(1), (decode_steps + 1,))],
        [Engine(StepTable(lambda rows: 1.0, context_tokens=1))],
        contention,
    )
    executor.launch(0, Launch(Task(Phase.DECODE, 0), Lane.DECODE))
    executor.launch(0, Launch(Task(Phase.REF_PREFIX, 0), Lane.WINDOW))
    ends = {}
    for _ in range(2):
        _, task = executor.wait()
        ends[task.phase] = executor.now_s
    return ends[Phase.DECODE], ends[Phase.REF_PREFIX]


@pytest.mark.parametrize(
    ("contention", "decode", "window", "ends"),
    [
        (1.0, 10, 4.0, (10.0, 4.0)),
        (1.5, 10, 4.0, (12.0, 6.0)),  # the pass takes 6 s, in which 4 steps are done; 6 more alone
        (2.0, 10, 4.0, (14.0, 8.0)),  # as one after the other
        (1.5, 4, 10.0, (6.0, 12.0)),
    ],
)
def test_contention_stretches_both_lanes_while_both_are_in_use(contention, decode, window, ends) -> None:
    assert _beside(contention, decode, window) == pytest.approx(ends)


@given(st.floats(1.0, 3.0), st.integers(1, 50), st.floats(0.1, 50.0))
def test_contention_of_two_gains_nothing_and_work_is_kept(contention: float, decode: int, window: float) -> None:
    last = max(_beside(contention, decode, window))
    shorter, longer = sorted((float(decode), window))
    assert last == pytest.approx(longer - shorter + shorter * contention)


def test_equal_seeds_equal_runs_and_prefixes_of_longer_ones() -> None:
    layout = Layout(engines=2, blocks=2, contention=1.2)
    first, again = (_simulate("rollplex", 4, layout, steps=2) for _ in range(2))
    assert first == again
    longer = _simulate("rollplex", 4, layout, steps=3)
    assert longer.steps[:2] == first.steps
    few, many = FEED.groups(0, 3), FEED.groups(0, 9)
    assert many[:3] == few and FEED.groups(1, 3) != few


def test_a_step_waits_for_its_slowest_block() -> None:
    alone = [_simulate("serial", 4, Layout(engines=1), steps=1)]
    both = _simulate("serial", 4, Layout(engines=1, blocks=2), steps=1)
    assert both.steps[0].end_s >= alone[0].steps[0].end_s
    assert both.events > 1.9 * alone[0].events
    assert {span.source for span in both.spans} == {"simulated"}


@pytest.mark.parametrize("name", [*SCHEDULES, *POOL_SCHEDULES, "async"])
def test_every_response_and_pass_is_there_once(name: str) -> None:
    layout = Layout(engines=2, trainers=2)
    found = _simulate(name, 4, layout, steps=2, traced=range(2))
    spec = StepSpec(num_groups=4, reference=True)
    wanted = sorted((step, task.phase, task.group or 0) for step in range(2) for task in spec.tasks)
    assert sorted((span.step, span.name, span.group or 0) for span in found.spans) == wanted
    assert all(times.start_s <= times.decoded_s <= times.trained_s for times in found.steps)


def test_pools_hide_what_one_after_the_other_shows() -> None:
    layout = Layout(engines=2, trainers=1, places=8)
    seconds = {name: _simulate(name, 8, layout, steps=3).seconds_per_step for name in (*POOL_SCHEDULES, "async")}
    assert seconds["async"] < seconds["disaggregated"]
    spec = StepSpec(num_groups=8)
    layout = Layout(engines=1, trainers=1, places=16)
    times = [
        simulate(schedule, spec, FEED, layout, seconds=lambda phase, load: SECONDS[phase], table=decode_table()).steps[
            0
        ]
        for schedule in (Disaggregated(), RolloutPipe(fgd=False), RolloutPipe(floor=2))
    ]
    assert times[0].dispatch_s >= times[0].decoded_s > times[1].dispatch_s
    assert times[0].compute_s == pytest.approx(times[1].compute_s) == pytest.approx(times[2].compute_s)
    assert times[0].waiting_ratio > times[1].waiting_ratio


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="contention is 0.5"):
        VirtualExecutor(lambda step, task: 1.0, lambda step: [], [], 0.5)
    with pytest.raises(StateError, match="nothing runs"):
        VirtualExecutor(lambda step, task: 1.0, lambda step: [], []).wait()
    with pytest.raises(ValueError, match="duration of -1"):
        VirtualExecutor(lambda step, task: -1.0, lambda step: [], []).launch(
            0, Launch(Task(Phase.OPTIMIZER), Lane.MAIN)
        )
    with pytest.raises(ConfigError, match="has engines, blocks and trainers"):
        Layout(engines=0)


def _us_per_event(name: str, devices: int) -> float:
    """CPU time."""
    gc.collect()
    return float(measure(name, devices, 1)["us_per_event"])


def _calls_per_event(name: str, devices: int) -> float:
    """Calls of functions, Python's and C's: the same on every machine."""
    calls = [0]

    def count(_frame: object, event: str, _argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        events = measure(name, devices, 1)["events"]
    finally:
        sys.setprofile(before)
    return calls[0] / float(events)


@pytest.mark.parametrize("name", ["rollplex", "disaggregated", "rolloutpipe"])
def test_work_is_linear_in_events(name: str) -> None:
    """Eight times the events, and an event costs about as much: quadratic work would be eight times over. Measured
    figures: docs/simulation.md."""
    few, many = (_calls_per_event(name, devices) for devices in (64, 512))
    assert many < 1.5 * few
    assert many < 200
    # Work inside one call, such as a list whose head is deleted, takes time alone. Other processes, which get in the
    # way of caches, only add to it: the least counts, of as many looks as it takes to see that.
    few, many = math.inf, math.inf
    for _ in range(10):
        few, many = min(few, _us_per_event(name, 64)), min(many, _us_per_event(name, 512))
        if many < 4 * few:
            break
    assert many < 4 * few
