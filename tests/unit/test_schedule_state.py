"""The state that schedules see against its definition: every answer anew from what was launched and what has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.errors import StateError
from rollplex.schedule.spec import Hold, Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, StepState

HOLDS = (
    Hold("rollout kv", Phase.PREFILL, (Phase.DECODE,), (3, 1, 2)),
    Hold("boundary", Phase.ACTOR_PREFIX, (Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD), (2, 2, 5)),
    Hold("workspace", Phase.ACTOR_RESPONSE, (), (1, 1, 4)),
)
SPECS = [
    StepSpec(num_groups=3, reference=True, holds=HOLDS),
    StepSpec(num_groups=3, trained=(0, 2), prefill_is_actor_prefix=True, holds=HOLDS),
    StepSpec(num_groups=3, rollout=False, holds=HOLDS),
    StepSpec(num_groups=3, unit=1, optimizer_steps=3, holds=HOLDS),
]


@dataclass
class Plain:
    """A line of states as two lists, with every question answered from the definition."""

    spec: StepSpec
    limits: Limits
    running: list[Launch] = field(default_factory=list)
    done: list[Task] = field(default_factory=list)

    def launched(self, task: Task) -> bool:
        return task in self.done or task in [launch.task for launch in self.running]

    def missing(self, task: Task) -> tuple[Task, ...]:
        return tuple(need for need in self.spec.needs(task) if need not in self.done)

    def used_bytes(self) -> int:
        return sum(
            life.nbytes
            for life in self.spec.lifetimes
            if self.launched(life.producer) and not life.users <= set(self.done)
        )

    def agrees_with(self, state: StepState) -> None:
        assert state.running == tuple(self.running)
        assert state.done == frozenset(self.done)
        assert state.used_bytes == self.used_bytes()
        assert state.finished == (set(self.done) == set(self.spec.tasks))
        assert state.idle == (not self.running)
        assert list(state.complete) == [task.group for task in self.done if task.phase is Phase.REWARD]
        for lane in Lane:
            tasks = tuple(launch.task for launch in self.running if launch.lane is lane)
            assert state.busy(lane) == len(tasks)
            slots = self.limits.slots(lane)
            assert state.has_slot(lane) == (slots is None or len(tasks) < slots)
        for phase in Phase:
            left = [task for task in self.spec.tasks if task.phase is phase and task not in self.done]
            assert state.all_done(phase) == (not left)
            assert state.runs(phase) == sum(launch.task.phase is phase for launch in self.running)
            startable = [task for task in left if not self.launched(task) and not self.missing(task)]
            assert list(state.startable(phase)) == startable
            assert state.left(phase) == len(left)
            assert state.started(phase) == sum(self.launched(task) for task in self.spec.tasks if task.phase is phase)
            done = [task.group for task in self.done if task.phase is phase and task.group is not None]
            assert list(state.ended(phase)) == done
        for task in self.spec.tasks:
            assert (state.launched(task), state.is_done(task)) == (self.launched(task), task in self.done)
            assert state.missing(task) == self.missing(task)
            fits = self.used_bytes() + self.spec.bytes_started(task) <= (self.limits.memory_bytes or 0)
            assert state.fits(task) == (fits or self.limits.memory_bytes is None)
        order = tuple(reversed(self.spec.by_group))
        unlaunched = [task for task in order if not self.launched(task)]
        assert list(state.unlaunched(order)) == unlaunched
        assert list(state.unlaunched(self.spec.by_stage)) == sorted(unlaunched, key=self.spec.by_stage.index)

    def after(self, event: Launch | Task) -> Plain:
        if isinstance(event, Launch):
            return Plain(self.spec, self.limits, [*self.running, event], self.done)
        left = [launch for launch in self.running if launch.task != event]
        return Plain(self.spec, self.limits, left, [*self.done, event])


@given(st.data(), st.sampled_from(SPECS), st.sampled_from([None, 6, 10]))
def test_any_walk_from_any_earlier_state_answers_as_defined(
    data: st.DataObject, spec: StepSpec, cap: int | None
) -> None:
    """Goes on from states of the past as well as from the newest: states share a ledger, and none may see another's."""
    limits = Limits(main=2, decode=2, window=1, memory_bytes=cap)
    line = [(StepState(spec, limits), Plain(spec, limits))]
    for _ in range(data.draw(st.integers(1, 40))):
        back = data.draw(st.sampled_from([0, 0, 0, 1, 2, 5]))
        state, plain = line[max(0, len(line) - 1 - back)]
        moves: list[Launch | Task] = [Launch(task, lane) for task in spec.tasks for lane in (Lane.MAIN, Lane.DECODE)]
        moves = [move for move in moves if isinstance(move, Launch) and state.obstacle(move) is None]
        moves += [launch.task for launch in plain.running]
        if not moves:
            break
        move = data.draw(st.sampled_from(moves))
        moved = state.launch(move) if isinstance(move, Launch) else state.finish(move)
        line.append((moved, plain.after(move)))
    for state, plain in line:
        plain.agrees_with(state)
        again = StepState(spec, limits, plain.running, plain.done)
        plain.agrees_with(again)
        assert again == state and hash(again) == hash(state)


def test_a_tried_launch_changes_no_other_state() -> None:
    state = StepState(SPECS[0], Limits(main=None))
    tried = state.launch(Launch(Task(Phase.PREFILL, 0), Lane.MAIN))
    assert state.running == () and tried.running == (Launch(Task(Phase.PREFILL, 0), Lane.MAIN),)
    other = state.launch(Launch(Task(Phase.PREFILL, 1), Lane.MAIN))
    assert [launch.task.group for launch in other.running] == [1]
    assert [launch.task.group for launch in tried.running] == [0]
    assert state != tried and tried != other and state == StepState(SPECS[0], Limits(main=None))


def test_a_unit_is_consumed_under_one_version_of_the_weights() -> None:
    """With a step per group, the second group's passes wait for the first's step, and no step comes early."""
    spec = StepSpec(num_groups=2, unit=1, optimizer_steps=2)
    state = StepState(spec, Limits(main=None))
    for group in (0, 1):
        for phase in (Phase.PREFILL, Phase.DECODE, Phase.REWARD):
            state = state.launch(Launch(Task(phase, group), Lane.MAIN)).finish(Task(phase, group))
    state = state.launch(Launch(Task(Phase.ACTOR_PREFIX, 1), Lane.MAIN))
    with pytest.raises(StateError, match="actor_prefix of group 0 belongs to a later unit: 1 groups are for optimizer"):
        state.launch(Launch(Task(Phase.ACTOR_PREFIX, 0), Lane.MAIN))
    with pytest.raises(StateError, match="optimizer of unit 0 needs 1 groups consumed, 0 are"):
        state.launch(Launch(Task(Phase.OPTIMIZER, 0), Lane.MAIN))
    state = state.finish(Task(Phase.ACTOR_PREFIX, 1))
    for task in (Task(Phase.ACTOR_RESPONSE, 1), Task(Phase.PREFIX_BACKWARD, 1), Task(Phase.OPTIMIZER, 0)):
        state = state.launch(Launch(task, Lane.MAIN)).finish(task)
    assert state.obstacle(Launch(Task(Phase.ACTOR_PREFIX, 0), Lane.MAIN)) is None
