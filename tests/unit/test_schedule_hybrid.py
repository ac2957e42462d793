"""The reference on devices of its own: what it hides, that the update stays that of `serial`, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.runtime.learner import check_schedule
from rollplex.schedule.registry import HYBRID_SCHEDULES, POOL_SCHEDULES, schedule_named
from rollplex.schedule.scripted import Durations, ScriptedExecutor
from rollplex.schedule.spec import REFERENCE, AdvantageScope, Hold, Phase, PrefixMode, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, run_step


@dataclass
class Recorder:
    """A scripted executor that notes what was launched where."""

    inner: ScriptedExecutor
    launches: list[Launch] = field(default_factory=list)

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        self.inner.launch(launch)

    def wait(self) -> Task:
        return self.inner.wait()

    def abort(self) -> None:
        self.inner.abort()


def _play(name: str, spec: StepSpec, limits: Limits, durations: Durations, finish_order=()) -> Recorder:
    recorder = Recorder(ScriptedExecutor(durations, finish_order=finish_order, limits=limits))
    assert run_step(schedule_named(name), recorder, spec, limits).finished
    return recorder


@st.composite
def _specs(draw: st.DrawFn) -> StepSpec:
    prefix = draw(st.sampled_from(PrefixMode))
    return StepSpec(
        num_groups=draw(st.integers(1, 5)),
        reference=True,
        prefix=prefix,
        prefill_is_actor_prefix=prefix is PrefixMode.SHARED and draw(st.booleans()),
        advantage=draw(st.sampled_from(AdvantageScope)),
    )


@given(st.data(), _specs())
def test_the_reference_is_apart_and_the_update_is_serials(data: st.DataObject, spec: StepSpec) -> None:
    limits = Limits(decode=data.draw(st.none() | st.integers(1, 3)), window=data.draw(st.integers(1, 3)))
    order = data.draw(st.permutations(sorted(spec.tasks, key=str)))
    hybrid = _play("hybrid", spec, limits, lambda _: 1.0, order)
    assert len(hybrid.launches) == len(set(hybrid.launches)) == len(spec.tasks)
    for launch in hybrid.launches:
        assert (launch.lane is Lane.WINDOW) == (launch.task.phase in REFERENCE)
    serial = _play("serial", spec, limits, lambda _: 1.0, order)
    own = [
        [x.task for x in played.launches if x.lane is Lane.MAIN and x.task.phase not in (*REFERENCE, Phase.PREFILL)]
        for played in (hybrid, serial)
    ]
    assert own[0] == own[1]


@given(st.data(), _specs())
def test_devices_for_the_reference_are_never_slower_than_none(data: st.DataObject, spec: StepSpec) -> None:
    seconds = data.draw(st.fixed_dictionaries({task: st.integers(1, 50) for task in spec.tasks}))
    limits = Limits(decode=data.draw(st.none() | st.integers(1, 3)), reward=data.draw(st.none() | st.integers(1, 2)))
    hybrid, serial = (_play(name, spec, limits, lambda task: seconds[task]) for name in ("hybrid", "serial"))
    assert hybrid.inner.makespan_s <= serial.inner.makespan_s


def test_the_reference_hides_beside_all_else() -> None:
    """Two groups by hand, passes of 1 s: prefill 2, decoding 6 (group 0: 2), a response pass of the reference 1 after
    each; then the actor's 6 passes, optimizer and publish."""
    seconds = {Task(Phase.DECODE, 0): 2.0, Task(Phase.DECODE, 1): 6.0}
    spec = StepSpec(num_groups=2, reference=True)
    played = _play("hybrid", spec, Limits(), lambda task: seconds.get(task, 1.0))
    assert played.inner.makespan_s == 2 + 6 + 6 + 2
    assert played.inner.busy_s(Lane.WINDOW) == 4.0


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({"reference": False}, Limits(), r"algorithm\.beta 0 has none"),
        ({"old_logps": True}, Limits(), "old log-probs"),
        ({"holds": (Hold("x", Phase.PREFILL, (), (1, 1)),)}, Limits(memory_bytes=9), "plan each by itself"),
        ({}, Limits(window=0), "Limits.window is 0"),
    ],
)
def test_what_it_refuses(changes: dict[str, object], limits: Limits, message: str) -> None:
    spec = replace(StepSpec(num_groups=2, reference=True), **changes)
    with pytest.raises(ConfigError, match=message):
        schedule_named("hybrid").check(spec, limits)


@pytest.mark.parametrize("name", [*HYBRID_SCHEDULES, *POOL_SCHEDULES])
def test_a_run_of_this_process_refuses_devices_of_two_kinds(name: str) -> None:
    config = Config.model_validate({"model": {"build": {}}, "schedule": {"name": name}, "algorithm": {"beta": 0.1}})
    with pytest.raises(
        ConfigError, match=rf"schedule\.name '{name}'.*rollplex simulate.*one of serial, rollplex, stream"
    ):
        check_schedule(config)
