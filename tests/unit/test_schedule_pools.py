"""Schedules for two pools, and `async`: no group lost, trained on twice or mixed across versions, in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import ConfigError, StateError
from rollplex.schedule.pools import Disaggregated, RolloutPipe
from rollplex.schedule.registry import POOL_SCHEDULES, schedule_named
from rollplex.schedule.run import Async, InTurn, RunSchedule, run_steps
from rollplex.schedule.scripted import ScriptedExecutor
from rollplex.schedule.spec import AdvantageScope, Hold, Phase, PrefixMode, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, Schedule, StepState, run_step

UPDATE = (Phase.ACTOR_PREFIX, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD)


@dataclass
class Journal:
    """Ends tasks in any order that hypothesis likes, and writes down what started and ended in which step."""

    data: st.DataObject
    running: list[tuple[int, Launch]] = field(default_factory=list)
    events: list[tuple[str, int, Task, Lane]] = field(default_factory=list)

    def launch(self, step: int, launch: Launch) -> None:
        self.running.append((step, launch))
        self.events.append(("start", step, launch.task, launch.lane))

    def wait(self) -> tuple[int, Task]:
        step, launch = self.running.pop(self.data.draw(st.integers(0, len(self.running) - 1)))
        self.events.append(("end", step, launch.task, launch.lane))
        return step, launch.task

    def abort(self) -> None:
        self.running.clear()

    def of(self, kind: str, *phases: Phase) -> list[tuple[int, Task]]:
        return [(step, task) for what, step, task, _ in self.events if what == kind and task.phase in phases]


def _play(schedule: RunSchedule, data: st.DataObject, specs: list[StepSpec], limits: Limits) -> Journal:
    journal = Journal(data)
    assert run_steps(schedule, journal, specs, limits) == len(specs)
    for kind in ("start", "end"):
        wanted = Counter((step, task) for step, spec in enumerate(specs) for task in spec.tasks)
        assert Counter((step, task) for what, step, task, _ in journal.events if what == kind) == wanted
    _check_versions(journal, specs)
    return journal


def _check_versions(journal: Journal, specs: list[StepSpec]) -> None:
    """The whole of a rollout sees one version of the engines' weights, the whole of an update one of the trainers'."""
    published = optimized = 0
    sampled: dict[int, set[int]] = {step: set() for step in range(len(specs))}
    trained: dict[tuple[int, int | None], set[int]] = {}
    busy = Counter[str]()
    for kind, step, task, _ in journal.events:
        pool = "engines" if task.phase in (Phase.PREFILL, Phase.DECODE) else "trainers"
        if task.phase is not Phase.REWARD:
            busy[pool] += 1 if kind == "start" else -1
        if pool == "engines":
            sampled[step].add(published)
        elif task.phase in UPDATE:
            trained.setdefault((step, task.group), set()).add(optimized)
        elif task.phase is Phase.PUBLISH:
            assert not busy["engines"], "weights were published while a group was in an engine"
            published += kind == "end"
        elif task.phase is Phase.OPTIMIZER:
            assert busy["trainers"] <= 1, "an optimizer step beside passes"
            optimized += kind == "end"
    assert all(len(versions) == 1 for versions in [*sampled.values(), *trained.values()])
    assert all(versions == {max(0, step - _lag(journal))} for step, versions in sampled.items())


def _lag(journal: Journal) -> int:
    return getattr(journal, "lag", 0)


@st.composite
def _specs(draw: st.DrawFn) -> StepSpec:
    unit = draw(st.none() | st.integers(1, 3))
    count = draw(st.integers(1, 6)) if unit is None else unit * draw(st.integers(1, 3))
    return StepSpec(
        num_groups=count,
        reference=draw(st.booleans()),
        prefix=draw(st.sampled_from(PrefixMode)),
        unit=unit,
        optimizer_steps=1 if unit is None else count // unit,
        old_logps=unit is None and draw(st.booleans()),
    )


_limits = st.builds(Limits, main=st.integers(1, 4), decode=st.none() | st.integers(1, 4), reward=st.none() | st.just(1))
_pipes = st.builds(
    RolloutPipe,
    cgp=st.booleans(),
    fgd=st.booleans(),
    unit=st.integers(1, 3),
    frontier=st.none() | st.integers(1, 3),
    floor=st.integers(0, 4),
    aging=st.none() | st.integers(1, 3),
)


@given(st.data(), st.just(Disaggregated()) | _pipes, st.lists(_specs(), min_size=1, max_size=2), _limits)
def test_every_group_once_under_one_version(
    data: st.DataObject, schedule: Schedule, specs: list[StepSpec], limits: Limits
) -> None:
    journal = _play(InTurn(schedule), data, specs, limits)
    for step, spec in enumerate(specs):
        begun = _first_passes(journal, step, spec)
        assert sorted(begun) == list(range(spec.num_groups))
        if isinstance(schedule, Disaggregated) or not schedule.cgp:
            assert begun == sorted(begun)  # in their own order, all after the last reward
            first = journal.events.index(("start", step, Task(_head(spec), 0), Lane.MAIN))
            rewarded = [task for what, at, task, _ in journal.events[:first] if (what, at) == ("end", step)]
            assert sum(task.phase is Phase.REWARD for task in rewarded) == spec.num_groups


def _head(spec: StepSpec) -> Phase:
    if spec.prefix is PrefixMode.WHOLE:
        return Phase.REF_RESPONSE if spec.reference or spec.old_logps else Phase.ACTOR_RESPONSE
    return Phase.REF_PREFIX if spec.reference else Phase.ACTOR_PREFIX


def _first_passes(journal: Journal, step: int, spec: StepSpec) -> list[int | None]:
    return [task.group for at, task in journal.of("start", _head(spec)) if at == step]


@given(st.data(), _pipes, _specs(), _limits)
def test_whole_units_first_in_first_out(data: st.DataObject, pipe: RolloutPipe, spec: StepSpec, limits: Limits) -> None:
    """Consumption is exact: what is trained on is a prefix of what is complete, in its order, a unit at a time."""
    pipe = replace(pipe, cgp=True)
    journal = _play(InTurn(pipe), data, [spec], limits)
    unit = spec.unit or pipe.unit
    complete: list[int | None] = []
    begun: list[int | None] = []
    optimized = 0
    for kind, _, task, _ in journal.events:
        if (kind, task.phase) == ("end", Phase.REWARD):
            complete.append(task.group)
        elif (kind, task.phase) == ("end", Phase.OPTIMIZER):
            optimized += 1
        elif (kind, task.phase) == ("start", _head(spec)):
            begun.append(task.group)
            whole = len(complete) if len(complete) == spec.num_groups else len(complete) // unit * unit
            assert begun == complete[: len(begun)] and len(begun) <= whole
            if spec.unit is not None:
                assert len(begun) <= unit * (optimized + 1)
    assert begun == complete
    if spec.unit is None:
        assert optimized == 1  # one step for all: sums of the same terms as `serial`
        assert journal.events[-4][2] == Task(Phase.OPTIMIZER)


@given(st.data(), _pipes, _specs())
def test_the_frontier_is_what_is_admitted(data: st.DataObject, pipe: RolloutPipe, spec: StepSpec) -> None:
    pipe = replace(pipe, fgd=True, aging=None)
    journal = _play(InTurn(pipe), data, [spec], Limits(main=2))
    width = max(pipe.frontier or spec.unit or pipe.unit, pipe.floor)
    live: list[int | None] = []
    started = []
    for kind, _, task, _ in journal.events:
        if (kind, task.phase) == ("start", Phase.PREFILL):
            live.append(task.group)
            started.append(task.group)
            assert len(live) <= width
        if (kind, task.phase) == ("end", Phase.DECODE):
            live.remove(task.group)
    assert started == sorted(started)


def _decoding_at_once(pipe: RolloutPipe, seconds: dict[int, float], count: int = 6) -> ScriptedExecutor:
    executor = ScriptedExecutor(lambda t: seconds.get(t.group or 0, 1.0) if t.phase is Phase.DECODE else 0.0)
    run_step(pipe, executor, StepSpec(num_groups=count), Limits())
    return executor


def test_aging_lets_others_pass_a_straggler() -> None:
    """Group 0 decodes for 100 s, the others for one. In a frontier of two it leaves one place to them; once two have
    overtaken it, it counts no more, and they are two at a time."""
    ends = {}
    for aging in (None, 2):
        executor = _decoding_at_once(RolloutPipe(frontier=2, aging=aging), {0: 100.0})
        ends[aging] = max(s.end_s for s in executor.spans if s.name == Phase.DECODE and s.group != 0)
    assert ends == {None: 5.0, 2: 4.0}


def test_handing_over_early_hides_training() -> None:
    """Two groups, 2 and 10 s of decoding, 4 s of training each: one after the other 10 + 8, pipelined 10 + 4."""
    seconds = {Phase.DECODE: {0: 2.0, 1: 10.0}, Phase.ACTOR_RESPONSE: {0: 4.0, 1: 4.0}}
    spec = StepSpec(num_groups=2, prefix=PrefixMode.WHOLE)
    makespans = {}
    for schedule in (Disaggregated(), RolloutPipe(cgp=False), RolloutPipe(fgd=False), RolloutPipe()):
        executor = ScriptedExecutor(lambda task: seconds.get(task.phase, {}).get(task.group or 0, 0.0))
        run_step(schedule, executor, spec, Limits())
        makespans[schedule] = executor.makespan_s
    # Admitting one group at a time (a unit is one) is the price of strict FGD: the engine could decode both.
    assert list(makespans.values()) == [18.0, 20.0, 14.0, 16.0]


@given(st.data(), st.lists(_specs(), min_size=1, max_size=4), _limits)
def test_async_is_late_by_exactly_one_update(data: st.DataObject, specs: list[StepSpec], limits: Limits) -> None:
    specs = [replace(spec, unit=None, optimizer_steps=1) for spec in specs]
    journal = Journal(data)
    journal.lag = Async.stale_steps  # type: ignore[attr-defined]
    assert run_steps(Async(), journal, specs, limits) == len(specs)
    assert Counter((step, task) for kind, step, task, _ in journal.events if kind == "end") == Counter(
        (step, task) for step, spec in enumerate(specs) for task in spec.tasks
    )
    _check_versions(journal, specs)


def test_async_samples_while_it_trains() -> None:
    """Rollouts of 10 s and updates of 10 s: three steps end at 40 s; on-policy, one after the other, at 60 s."""

    class Clock(Journal):
        now_s = 0.0

        def launch(self, step: int, launch: Launch) -> None:
            long = launch.task.phase in (Phase.DECODE, Phase.ACTOR_RESPONSE)
            self.running.append((step, launch))
            self.ends[step, launch.task] = self.now_s + 10.0 * long

        def wait(self) -> tuple[int, Task]:
            found = min(self.running, key=lambda item: self.ends[item[0], item[1].task])
            self.running.remove(found)
            self.now_s = max(self.now_s, self.ends[found[0], found[1].task])
            return found[0], found[1].task

    spec, times = StepSpec(num_groups=1), []
    for schedule in (Async(), InTurn(Disaggregated())):
        clock = Clock(data=None)  # type: ignore[arg-type]
        clock.ends = {}
        run_steps(schedule, clock, [spec] * 3, Limits())
        times.append(clock.now_s)
    assert times == [40.0, 60.0]


@pytest.mark.parametrize("name", sorted(POOL_SCHEDULES))
@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({"prefill_is_actor_prefix": True}, Limits(), "prefill_is_actor_prefix off"),
        ({"trained": (0,)}, Limits(), "StepSpec.unit"),
        ({"rollout": False}, Limits(), "StepSpec.unit"),
        ({"holds": (Hold("x", Phase.PREFILL, (), (1, 1)),)}, Limits(memory_bytes=9), "plan each pool by itself"),
    ],
)
def test_what_two_pools_refuse(name: str, changes: dict[str, object], limits: Limits, message: str) -> None:
    spec = replace(StepSpec(num_groups=2), **changes)
    with pytest.raises(ConfigError, match=message):
        schedule_named(name).check(spec, limits)
    with pytest.raises(ConfigError, match=message):
        Async().check(spec, limits)


def test_early_training_refuses_advantages_of_the_batch() -> None:
    spec = StepSpec(num_groups=2, advantage=AdvantageScope.BATCH)
    with pytest.raises(ConfigError, match="use 'disaggregated'"):
        RolloutPipe().check(spec, Limits())
    RolloutPipe(cgp=False).check(spec, Limits())
    Disaggregated().check(spec, Limits())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": 2, "optimizer_steps": 1}, "units of 2 groups and 1 optimizer steps do not make the 4 groups"),
        ({"unit": 2, "optimizer_steps": 2, "old_logps": True}, "old log-probs must then come from the engine"),
        ({"unit": 2, "optimizer_steps": 2, "advantage": AdvantageScope.BATCH}, "the group's own rewards"),
    ],
)
def test_units_that_contradict_the_step(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(StepSpec(num_groups=4), **changes)


def test_admission_needs_whole_numbers_of_groups() -> None:
    with pytest.raises(ConfigError, match="count groups"):
        RolloutPipe(frontier=0)
    with pytest.raises(ConfigError, match="floor is -1"):
        RolloutPipe(floor=-1)


class Forgetful:
    """Samples everything, and then starts nothing."""

    name = "forgetful"

    def check(self, spec: StepSpec, limits: Limits) -> None:
        del spec, limits

    def ready(self, state: StepState) -> tuple[Launch, ...]:
        tasks = (Task(phase, 0) for phase in (Phase.PREFILL, Phase.DECODE))
        return tuple(launch for launch in (Launch(task, Lane.MAIN) for task in tasks) if state.obstacle(launch) is None)


@given(st.data())
def test_a_run_that_is_stuck_names_the_step_and_the_phase(data: st.DataObject) -> None:
    with pytest.raises(
        StateError, match="step 0: schedule 'forgetful' launches nothing .* waits for reward of group 0"
    ):
        run_steps(InTurn(Forgetful()), Journal(data), [StepSpec(num_groups=1)] * 2, Limits())
