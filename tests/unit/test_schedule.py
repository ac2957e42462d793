"""Schedules on the simulated clock: every task once, after its needs, in any order of completion and under any cap."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollplex.config import Config
from rollplex.errors import ConfigError, StateError
from rollplex.schedule.registry import SCHEDULES, schedule_named
from rollplex.schedule.scripted import Durations, ScriptedExecutor, by_phase
from rollplex.schedule.spec import AdvantageScope, Hold, Phase, PrefixMode, StepSpec, Task
from rollplex.schedule.spec_from_config import graph_crosses_lanes, steps_of_rollout
from rollplex.schedule.step import Lane, Launch, Limits, StepState, run_step
from rollplex.schedule.turn import peak_of_rest

PER_GROUP = [phase for phase in Phase if phase not in (Phase.OPTIMIZER, Phase.PUBLISH)]
PASSES = [phase for phase in PER_GROUP if phase not in (Phase.DECODE, Phase.REWARD)]


@dataclass
class Recorder:
    """Passes everything on to an executor and writes down what started and ended, in order."""

    inner: ScriptedExecutor
    events: list[tuple[str, Task, Lane | None]] = field(default_factory=list)
    aborted: bool = False

    def launch(self, launch: Launch) -> None:
        self.inner.launch(launch)
        self.events.append(("start", launch.task, launch.lane))

    def wait(self) -> Task:
        task = self.inner.wait()
        self.events.append(("end", task, None))
        return task

    def abort(self) -> None:
        self.aborted = True
        self.inner.abort()

    def at(self, event: str, task: Task) -> int:
        return next(i for i, (kind, found, _) in enumerate(self.events) if (kind, found) == (event, task))


def _play(name: str, spec: StepSpec, limits: Limits, durations: Durations, finish_order=()) -> Recorder:
    recorder = Recorder(ScriptedExecutor(durations, finish_order=finish_order, limits=limits))
    state = run_step(schedule_named(name), recorder, spec, limits)
    assert state.finished and not state.running
    return recorder


@st.composite
def _specs(draw: st.DrawFn, *, most_groups: int = 5) -> StepSpec:
    count = draw(st.integers(1, most_groups))
    prefix = draw(st.sampled_from(PrefixMode))
    rollout = draw(st.booleans()) or draw(st.booleans())
    sizes = st.lists(st.integers(0, 9), min_size=count, max_size=count).map(tuple)
    holds = (
        Hold("rollout kv", Phase.PREFILL, (Phase.DECODE,), draw(sizes)),
        Hold("response kv", Phase.DECODE, (), draw(sizes)),
        Hold("ref boundary", Phase.REF_PREFIX, (Phase.REF_RESPONSE,), draw(sizes)),
        Hold(
            "actor boundary",
            Phase.ACTOR_PREFIX,
            (Phase.DECODE, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD),
            draw(sizes),
        ),
        Hold("boundary gradients", Phase.ACTOR_RESPONSE, (Phase.PREFIX_BACKWARD,), draw(sizes)),
        Hold("workspace", Phase.PREFIX_BACKWARD, (), draw(sizes)),
    )
    groups = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    return StepSpec(
        num_groups=count,
        rollout=rollout,
        trained=draw(st.none() | groups.map(sorted).map(tuple)),
        reference=rollout and draw(st.booleans()),
        old_logps=rollout and draw(st.booleans()),
        prefix=prefix,
        prefill_is_actor_prefix=rollout and prefix is PrefixMode.SHARED and draw(st.booleans()),
        advantage=draw(st.sampled_from(AdvantageScope)),
        holds=holds,
    )


def _runs(name: str, spec: StepSpec) -> bool:
    """Whether this schedule takes such steps at all."""
    if name == "rollplex":
        return spec.prefix is not PrefixMode.WHOLE
    return name != "stream" or spec.advantage is AdvantageScope.GROUP


def _expected(spec: StepSpec) -> set[Task]:
    """The tasks of a step, written down a second time."""
    groups = range(spec.num_groups)
    split, trained = spec.prefix is not PrefixMode.WHOLE, set(groups if spec.trained is None else spec.trained)
    there = {
        Phase.REF_PREFIX: set(groups) if spec.reference and split else set(),
        Phase.REF_RESPONSE: set(groups) if spec.reference or spec.old_logps else set(),
        Phase.ACTOR_RESPONSE: trained,
        Phase.PREFIX_BACKWARD: trained if split else set(),
        Phase.ACTOR_PREFIX: set(groups) if spec.old_logps else trained,
    }
    if not split or spec.prefill_is_actor_prefix:
        there[Phase.ACTOR_PREFIX] = set()
    for phase in (Phase.PREFILL, Phase.DECODE, Phase.REWARD):
        there[phase] = set(groups) if spec.rollout else set()
    tasks = {Task(phase, group) for phase, members in there.items() for group in members}
    return tasks | {Task(Phase.OPTIMIZER), Task(Phase.PUBLISH)}


# (reader, what it reads), of one group.
PAIRS = [
    (Phase.DECODE, Phase.PREFILL),
    (Phase.REWARD, Phase.DECODE),
    (Phase.REF_RESPONSE, Phase.DECODE),
    (Phase.REF_RESPONSE, Phase.REF_PREFIX),
    (Phase.ACTOR_RESPONSE, Phase.DECODE),
    (Phase.ACTOR_RESPONSE, Phase.REWARD),
    (Phase.ACTOR_RESPONSE, Phase.REF_RESPONSE),
    (Phase.ACTOR_RESPONSE, Phase.ACTOR_PREFIX),
    (Phase.PREFIX_BACKWARD, Phase.ACTOR_RESPONSE),
]


def _check_order(recorder: Recorder, spec: StepSpec) -> None:
    tasks = _expected(spec)
    for event in ("start", "end"):
        assert Counter(task for kind, task, _ in recorder.events if kind == event) == Counter(tasks)

    def after(reader: Task, writer: Task) -> None:
        if reader in tasks and writer in tasks:
            assert recorder.at("start", reader) > recorder.at("end", writer), f"{reader} before {writer}"

    for group in range(spec.num_groups):
        for reader, writer in PAIRS:
            after(Task(reader, group), Task(writer, group))
        if spec.old_logps:
            after(Task(Phase.REF_RESPONSE, group), Task(Phase.ACTOR_PREFIX, group))
        if spec.advantage is AdvantageScope.BATCH:
            for other in range(spec.num_groups):
                after(Task(Phase.ACTOR_RESPONSE, group), Task(Phase.REWARD, other))
    optimizer = Task(Phase.OPTIMIZER)
    for task in tasks - {optimizer, Task(Phase.PUBLISH)}:
        after(optimizer, task)
    after(Task(Phase.PUBLISH), optimizer)


def _check_memory(recorder: Recorder, spec: StepSpec, cap: int) -> int:
    """Adds up what is held, from the holds alone. The largest sum."""
    users: dict[tuple[str, int], set[Task]] = {}
    starts: dict[Task, list[tuple[str, int]]] = {}
    for hold in spec.holds:
        for group in range(spec.num_groups):
            named = [hold.producer, *hold.readers]
            if spec.prefill_is_actor_prefix:
                named = [Phase.PREFILL if phase is Phase.ACTOR_PREFIX else phase for phase in named]
            found = [Task(phase, group) for phase in named]
            if found[0] in _expected(spec):
                users[hold.name, group] = set(found) & _expected(spec)
                starts.setdefault(found[0], []).append((hold.name, group))
    sizes = {hold.name: hold.nbytes for hold in spec.holds}
    held, ended, peak = {}, set(), 0
    for kind, task, _ in recorder.events:
        if kind == "start":
            held |= {key: sizes[key[0]][key[1]] for key in starts.get(task, [])}
        else:
            ended.add(task)
            held = {key: size for key, size in held.items() if not users[key] <= ended}
        peak = max(peak, sum(held.values()))
        assert peak <= cap
    assert not held
    return peak


def _smallest_cap(name: str, spec: StepSpec) -> int:
    orders = [spec.by_stage] + ([spec.by_group] if name == "stream" else [])
    return min(peak_of_rest(StepState(spec, Limits()), order)[0] for order in orders)


@given(st.data(), st.sampled_from(sorted(SCHEDULES)), _specs())
def test_every_task_once_and_after_its_needs(data: st.DataObject, name: str, spec: StepSpec) -> None:
    assume(_runs(name, spec))
    finish_order = data.draw(st.permutations(sorted(_expected(spec), key=str)))
    slots = st.none() | st.integers(1, 3)
    limits = Limits(
        main=data.draw(st.integers(1, 2)),
        decode=data.draw(slots),
        window=data.draw(st.none() | st.integers(0, 3)),
        reward=data.draw(slots),
    )
    recorder = _play(name, spec, limits, lambda _: 1.0, finish_order)
    _check_order(recorder, spec)


@given(st.data(), st.sampled_from(sorted(SCHEDULES)), _specs())
def test_the_smallest_cap_is_enough_and_one_byte_less_is_refused(
    data: st.DataObject, name: str, spec: StepSpec
) -> None:
    assume(_runs(name, spec))
    smallest = _smallest_cap(name, spec)
    cap = smallest + data.draw(st.sampled_from([0, 0, 1, 5, 20]))
    limits = Limits(
        decode=data.draw(st.none() | st.integers(1, 2)), window=data.draw(st.integers(0, 3)), memory_bytes=cap
    )
    finish_order = data.draw(st.permutations(sorted(_expected(spec), key=str)))
    recorder = _play(name, spec, limits, lambda _: 1.0, finish_order)
    _check_order(recorder, spec)
    _check_memory(recorder, spec, cap)
    if smallest > 0:
        with pytest.raises(ConfigError, match=f"at least {smallest} bytes"):
            _play(name, spec, replace(limits, memory_bytes=smallest - 1), lambda _: 1.0)


@given(st.data(), _specs())
def test_without_a_window_rollplex_is_serial(data: st.DataObject, spec: StepSpec) -> None:
    assume(_runs("rollplex", spec))
    finish_order = data.draw(st.permutations(sorted(_expected(spec), key=str)))
    limits = Limits(decode=data.draw(st.none() | st.integers(1, 3)), window=0)
    serial, moved = (_play(name, spec, limits, lambda _: 1.0, finish_order) for name in ("serial", "rollplex"))
    assert serial.events == moved.events


@given(st.data(), st.sampled_from(["serial", "rollplex"]), _specs())
def test_updates_add_up_in_the_order_of_the_groups(data: st.DataObject, name: str, spec: StepSpec) -> None:
    """So that `rollplex` gives the bits of `serial`, whatever order groups, rewards and prefixes are complete in."""
    assume(_runs(name, spec))
    finish_order = data.draw(st.permutations(sorted(_expected(spec), key=str)))
    recorder = _play(name, spec, Limits(window=data.draw(st.integers(0, 3))), lambda _: 1.0, finish_order)
    for phase in (Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD):
        order = [task.group for kind, task, _ in recorder.events if kind == "start" and task.phase is phase]
        assert order == sorted(order)


@given(st.data(), _specs())
def test_more_overlap_is_never_slower(data: st.DataObject, spec: StepSpec) -> None:
    """stream <= rollplex <= serial, with one pass at a time and no cap: decoding and rewards then do not depend on the
    order of passes, and a device that never idles while a pass could run is done first (docs/schedules.md)."""
    spec = replace(
        spec, prefix=spec.prefix if spec.prefix is not PrefixMode.WHOLE else PrefixMode.PER_RESPONSE, holds=()
    )
    seconds = data.draw(st.fixed_dictionaries({task: st.integers(1, 50) for task in spec.tasks}))
    limits = Limits(decode=data.draw(st.none() | st.integers(1, 3)), reward=data.draw(st.none() | st.integers(1, 2)))
    names = ["serial", "rollplex"] + (["stream"] if _runs("stream", spec) else [])
    times = [_play(name, spec, limits, lambda task: seconds[task]).inner.makespan_s for name in names]
    assert times == sorted(times, reverse=True)


def _two_groups(**changes: object) -> StepSpec:
    return replace(StepSpec(num_groups=2, reference=True), **changes)


def test_each_schedule_hides_more() -> None:
    """Two groups, one long; by hand. Decoding ends at 2 + 12, and what is left after it decides."""
    seconds = {
        Task(Phase.DECODE, 0): 2.0,
        Task(Phase.DECODE, 1): 12.0,
        **{Task(phase, g): 1.0 for phase in [*PASSES, Phase.REWARD] for g in (0, 1)},
        Task(Phase.OPTIMIZER): 1.0,
        Task(Phase.PUBLISH): 1.0,
    }
    spec = _two_groups()
    makespans = {name: _play(name, spec, Limits(), lambda t: seconds[t]).inner.makespan_s for name in SCHEDULES}
    # 2 prefills, 12 s of decoding, then 10 passes, optimizer and publish; 4 prefixes fewer; the 3 of group 0 fewer
    assert makespans == {"serial": 26.0, "rollplex": 22.0, "stream": 19.0}


@given(st.data(), st.sampled_from(sorted(SCHEDULES)), _specs())
def test_window_beside_decoding_and_main_alone(data: st.DataObject, name: str, spec: StepSpec) -> None:
    assume(_runs(name, spec))
    cap = _smallest_cap(name, spec) + data.draw(st.integers(0, 20))
    slots = data.draw(st.none() | st.integers(1, 2))
    limits = Limits(
        decode=slots, window=data.draw(st.integers(0, 2)), memory_bytes=data.draw(st.sampled_from([None, cap]))
    )
    recorder = _play(name, spec, limits, lambda _: 1.0, data.draw(st.permutations(sorted(_expected(spec), key=str))))
    lanes = {task: lane for kind, task, lane in recorder.events if kind == "start"}
    running: Counter[Lane] = Counter()
    for kind, task, _ in recorder.events:
        lane = lanes[task]
        running[lane] += 1 if kind == "start" else -1
        if kind == "start" and lane is Lane.WINDOW:
            assert running[Lane.DECODE] > 0 and name != "serial"
        assert not (running[Lane.MAIN] and (running[Lane.DECODE] or running[Lane.WINDOW]))


def _seconds(spec: StepSpec, rows: dict[Phase, tuple[float, float]]) -> Durations:
    """Seconds per phase for groups 0 and 1; a phase that is not named takes 1 s."""
    assert set(rows) <= {task.phase for task in spec.tasks}
    return lambda task: rows.get(task.phase, (1.0, 1.0))[task.group or 0]


def test_a_boundary_never_takes_the_room_of_a_rollout() -> None:
    """No boundary may keep a group from decoding: a prefix of group 0 that ran beside decoding would be held until the
    slow rewards of group 0 are there, and group 1 could only then be decoded and rewarded."""
    spec = StepSpec(
        num_groups=2,
        holds=(
            Hold("rollout kv", Phase.PREFILL, (Phase.DECODE,), (2, 3)),
            Hold("boundary", Phase.ACTOR_PREFIX, (Phase.PREFIX_BACKWARD,), (1, 1)),
        ),
    )
    seconds, limits = _seconds(spec, {Phase.DECODE: (2.0, 2.0), Phase.REWARD: (10.0, 10.0)}), Limits(memory_bytes=3)
    times = [_play(name, spec, limits, seconds).inner.makespan_s for name in ("serial", "rollplex", "stream")]
    assert times == [20.0, 20.0, 20.0]


def test_overlap_can_lose_under_a_memory_cap() -> None:
    """A counterexample to "more overlap is never slower": rollouts still fit one by one beside a boundary that is held
    early, but no longer two at once, and the slow rewards of group 1 begin later."""
    spec = StepSpec(
        num_groups=3,
        holds=(
            Hold("rollout kv", Phase.PREFILL, (Phase.DECODE,), (2, 3, 1)),
            Hold("boundary", Phase.ACTOR_PREFIX, (Phase.PREFIX_BACKWARD,), (3, 1, 3)),
        ),
    )
    rows = {Task(Phase.DECODE, 1): 2.0, Task(Phase.DECODE, 2): 3.0, Task(Phase.REWARD, 1): 10.0}
    limits = Limits(memory_bytes=4)
    times = [_play(name, spec, limits, lambda t: rows.get(t, 1.0)).inner.makespan_s for name in ("serial", "rollplex")]
    assert times == [23.0, 25.0]


def test_overlap_can_lose_with_several_passes_at_once() -> None:
    """Another counterexample: two passes fit beside decoding, but only one alone. What `stream` runs early there may
    be short and leave long ones to the end, which `rollplex` had run side by side."""
    spec = _two_groups()
    rows = {
        Phase.PREFILL: (1.0, 5.0),
        Phase.DECODE: (1.0, 5.0),
        Phase.REWARD: (3.0, 2.0),
        Phase.REF_PREFIX: (1.0, 10.0),
        Phase.ACTOR_PREFIX: (3.0, 5.0),
        Phase.REF_RESPONSE: (1.0, 5.0),
        Phase.ACTOR_RESPONSE: (10.0, 10.0),
        Phase.PREFIX_BACKWARD: (5.0, 1.0),
    }
    limits, seconds = Limits(window=2), _seconds(spec, rows)
    times = [_play(name, spec, limits, seconds).inner.makespan_s for name in ("rollplex", "stream")]
    assert times == [50.0, 54.0]


class Idle:
    """Launches prefills and decoding, and then nothing."""

    name = "idle"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        del spec, limits

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        launches = [Launch(Task(Phase.PREFILL, g), Lane.DECODE) for g in range(state.spec.num_groups)]
        launches += [Launch(Task(Phase.DECODE, g), Lane.DECODE) for g in range(state.spec.num_groups)]
        return tuple(launch for launch in launches if state.obstacle(launch) is None)


def test_a_deadlock_is_named_with_what_waits_for_it() -> None:
    recorder = Recorder(ScriptedExecutor(lambda _: 1.0))
    with pytest.raises(StateError) as error:
        run_step(Idle(), recorder, _two_groups(), Limits())
    message = str(error.value)
    assert "schedule 'idle' launches nothing while nothing runs, with 4 of 18 tasks done" in message
    assert "waits for reward of group 0" in message and "actor_response of group 0" in message
    assert recorder.aborted


class Greedy:
    """Launches whatever its needs allow, with no thought of what comes after; no task of the phases in `never`."""

    name = "greedy"

    def __init__(self, *never: Phase) -> None:
        self.never = never

    def check(self, spec: StepSpec, limits: Limits) -> None:
        del spec, limits

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        first = state
        for task in state.spec.tasks:
            launch = Launch(task, Lane.MAIN)
            if task.phase not in self.never and state.obstacle(launch) is None:
                state = state.launch(launch)
        return state.running[len(first.running) :]


def test_a_deadlock_does_not_blame_a_task_of_a_later_unit() -> None:
    """Weights that move within the rollout: group 1 may not be trained on before the optimizer step of group 0."""
    spec = StepSpec(num_groups=2, unit=1, optimizer_steps=2)
    with pytest.raises(StateError, match="it waits for optimizer of unit 0: its needs are done"):
        run_step(Greedy(Phase.OPTIMIZER), ScriptedExecutor(lambda _: 1.0), spec, Limits(main=None))


def _tight() -> StepSpec:
    """The smallest cap is 2: one boundary and its gradients at a time."""
    return StepSpec(
        num_groups=2,
        holds=(
            Hold("boundary", Phase.ACTOR_PREFIX, (Phase.PREFIX_BACKWARD,), (1, 1)),
            Hold("gradients", Phase.ACTOR_RESPONSE, (Phase.PREFIX_BACKWARD,), (1, 1)),
        ),
    )


def test_a_deadlock_of_memory_names_the_bytes() -> None:
    with pytest.raises(
        StateError, match=r"waits for actor_response of group 0: it begins to hold 1 bytes beside 2 held, of 2"
    ):
        run_step(Greedy(), ScriptedExecutor(lambda _: 1.0), _tight(), Limits(main=None, memory_bytes=2))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_ours_end_where_a_greedy_one_is_stuck(name: str) -> None:
    recorder = _play(name, _tight(), Limits(memory_bytes=2), lambda _: 1.0)
    assert _check_memory(recorder, _tight(), 2) == 2


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([Launch(Task(Phase.DECODE, 0), Lane.DECODE)], "decode of group 0 needs prefill of group 0, not done yet"),
        ([Launch(Task(Phase.OPTIMIZER), Lane.MAIN)], "optimizer needs prefill of group 0 and 15 more, not done yet"),
        ([Launch(Task(Phase.PREFILL, 0), Lane.MAIN)] * 2, "prefill of group 0 was launched before"),
        ([Launch(Task(Phase.PREFILL, g), Lane.MAIN) for g in (0, 1)], "found no slot: lane main has 1"),
        ([Launch(Task(Phase.PREFILL, 2), Lane.MAIN)], "prefill of group 2 is no task of this step"),
    ],
)
def test_illegal_launches_are_refused(launches: list[Launch], message: str) -> None:
    state = StepState(_two_groups(), Limits())
    with pytest.raises(StateError, match=message):
        for launch in launches:
            state = state.launch(launch)


def test_ending_what_does_not_run_is_refused() -> None:
    with pytest.raises(StateError, match="prefill of group 0 ended without running"):
        StepState(_two_groups(), Limits()).finish(Task(Phase.PREFILL, 0))


class Failing(ScriptedExecutor):
    """Ends in an error at one task, as an executor whose pass or reward raised."""

    def wait(self) -> Task:
        task = super().wait()
        if task.phase is Phase.REWARD:
            raise ValueError("a reward that raised")
        return task


def test_an_error_stops_what_else_runs() -> None:
    recorder = Recorder(Failing(by_phase(dict.fromkeys(Phase, 1.0))))
    with pytest.raises(ValueError, match="a reward that raised"):
        run_step(schedule_named("stream"), recorder, _two_groups(), Limits())
    assert recorder.aborted
    with pytest.raises(StateError, match="nothing runs"):
        recorder.wait()


def test_a_schedule_that_overfills_a_lane_is_caught_by_the_executor_too() -> None:
    executor = ScriptedExecutor(lambda _: 1.0, limits=Limits(main=1))
    executor.launch(Launch(Task(Phase.PREFILL, 0), Lane.MAIN))
    with pytest.raises(StateError, match="lane main, whose 1 slots are taken"):
        executor.launch(Launch(Task(Phase.PREFILL, 1), Lane.MAIN))


def test_busy_time_counts_overlapping_spans_once() -> None:
    spec = StepSpec(num_groups=3)
    recorder = _play("serial", spec, Limits(), by_phase({**dict.fromkeys(Phase, 1.0), Phase.DECODE: 5.0}))
    assert recorder.inner.busy_s(Lane.DECODE) == 5.0
    assert recorder.inner.busy_s(Lane.MAIN) == recorder.inner.makespan_s - 5.0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("stream", {"optimizer_steps": 4}, r"found 4 \(algorithm.steps_per_generation x algorithm.num_iterations\)"),
        ("stream", {"advantage": AdvantageScope.BATCH}, "algorithm.scale_rewards=batch"),
        ("stream", {"resampling": True}, "algorithm.dynamic_sampling=resample"),
    ],
)
def test_steps_that_a_schedule_refuses(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _play(name, _two_groups(**changes), Limits(), lambda _: 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 0}, "needs groups"),
        ({"trained": (0, 0)}, "distinct groups"),
        ({"trained": (2,)}, "distinct groups"),
        ({"trained": ()}, "distinct groups"),
        ({"prefix": PrefixMode.WHOLE, "prefill_is_actor_prefix": True}, "needs shared prefixes"),
        ({"holds": (Hold("x", Phase.PREFILL, (), (1,)),)}, "bytes for each of 2 groups"),
        ({"holds": (Hold("x", Phase.PREFILL, (Phase.OPTIMIZER,), (1, 1)),)}, "have no group"),
    ],
)
def test_descriptions_that_contradict_themselves(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _two_groups(**changes)


def test_limits_refuse_what_could_never_run() -> None:
    with pytest.raises(ValueError, match="lane main has 0 slots"):
        Limits(main=0)
    with pytest.raises(ValueError, match="memory_bytes is -1"):
        Limits(memory_bytes=-1)


@pytest.mark.parametrize("name", ["strem", "no_such_module:X", "rollplex.schedule.serial:Nothing"])
def test_unknown_schedules(name: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule '{name}'"):
        schedule_named(name)


def _config(**sections: object) -> Config:
    tree = {"model": {"build": {}}, "rollout": {"prompts_per_step": 4}, **sections}
    return Config.model_validate(json.loads(json.dumps(tree)))


def test_a_plain_run_is_one_step() -> None:
    (spec,) = steps_of_rollout(_config(algorithm={"beta": 0.04}), prefill_is_actor_prefix=True, minibatches=[4])
    assert (spec.num_groups, spec.reference, spec.old_logps, spec.learning) == (4, True, False, (0, 1, 2, 3))
    assert Task(Phase.ACTOR_PREFIX, 0) not in spec.tasks
    assert Task(Phase.PREFILL, 0) in spec.needs(Task(Phase.ACTOR_RESPONSE, 0))


def test_several_optimizer_steps_are_several_specs() -> None:
    config = _config(algorithm={"beta": 0.04, "steps_per_generation": 2, "num_iterations": 2})
    first, *later = steps_of_rollout(config, prefill_is_actor_prefix=False, minibatches=[2, 2])
    assert [spec.learning for spec in (first, *later)] == [(0, 1), (2, 3)] * 2
    assert first.old_logps and first.reference
    # every group is scored before the weights move; only those of this step are trained on
    assert [t.group for t in first.tasks if t.phase is Phase.REF_RESPONSE] == [0, 1, 2, 3]
    assert [t.group for t in first.tasks if t.phase is Phase.ACTOR_RESPONSE] == [0, 1]
    # prefixes are computed anew under the moved weights
    assert {t.phase for t in later[0].tasks if t.group is not None} == {
        Phase.ACTOR_PREFIX,
        Phase.ACTOR_RESPONSE,
        Phase.PREFIX_BACKWARD,
    }
    for spec in (first, *later):
        _check_order(_play("rollplex", spec, Limits(), lambda _: 1.0), spec)
        with pytest.raises(ConfigError, match="one optimizer step per rollout, found 4"):
            _play("stream", spec, Limits(), lambda _: 1.0)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"scale_rewards": "batch"},
        {"loss_type": "reinforce_pp"},
        {"dynamic_sampling": "resample"},
        {"num_iterations": 2},
    ],
)
def test_stream_refuses_what_the_configuration_says(algorithm: dict[str, object]) -> None:
    spec = steps_of_rollout(_config(algorithm=algorithm), prefill_is_actor_prefix=True, minibatches=[4])[0]
    with pytest.raises(ConfigError, match="schedule 'stream'"):
        schedule_named("stream").check(spec, Limits())
    schedule_named("rollplex").check(spec, Limits())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_group_that_finds_room_later_is_prefilled_beside_those_that_decode(name: str) -> None:
    """As engines do; were it held back under `serial`, hoisting would be credited with more than it hides."""
    spec = StepSpec(num_groups=3, holds=(Hold("rollout kv", Phase.PREFILL, (Phase.DECODE,), (1, 1, 1)),))
    rows = {Task(Phase.DECODE, 1): 9.0}
    recorder = _play(name, spec, Limits(memory_bytes=2), lambda task: rows.get(task, 1.0))
    spans = {(span.name, span.group): (span.start_s, span.lane) for span in recorder.inner.spans}
    assert spans[Phase.PREFILL, 2] == (3.0, Lane.DECODE)  # two prefills, then group 0 decodes for 1 s
    assert spans[Phase.DECODE, 2] == (4.0, Lane.DECODE)
    assert spans[Phase.DECODE, 1] == (2.0, Lane.DECODE)


class NeedsArguments:
    """No schedule: it cannot be made without one."""

    def __init__(self, argument: int) -> None:
        self.argument = argument


class Nameless:
    """No schedule: it decides nothing."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:NeedsArguments", "needed a class without arguments: TypeError"),
        (f"{__name__}:Nameless", "it has no name and no check and no ready"),
    ],
)
def test_schedules_of_somebody_else_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_named(name)


@pytest.mark.parametrize(
    ("changes", "crosses"),
    [
        ({}, False),  # only the reference's prefixes move
        ({"schedule": {"name": "stream"}}, True),
        ({"schedule": {"name": "stream"}, "train": {"prefix_activations": "recompute"}}, False),
        ({"schedule": {"name": "stream"}, "train": {"prefix_activations": "checkpoint"}}, True),
        ({"rollout": {"engine": "vllm"}}, True),
        ({"train": {"share_prefix": False, "unshared_prefix": "per_response"}}, True),
        ({"train": {"share_prefix": False}}, False),
    ],
)
def test_a_graph_crosses_lanes_where_passes_with_gradients_move(
    changes: dict[str, dict[str, Any]], crosses: bool
) -> None:
    assert graph_crosses_lanes(_config(**changes)) is crosses
