"""Whether an arrangement of devices fits under a memory cap, and what it takes to make it fit. Pure.

Records are those of memory/contract.py under tensor x data parallelism, with a pipeline applied (divided.py):

    colocated       every device holds all records (hybrid: but those of the reference)
    training pool   all but the rollout's cache, workspace and weights
    rollout pool    only these
    reference pool  the reference's weights and boundaries, and what one of its passes needs

Colocated, the two weight layouts are one backing, which takes the rollout's degrees to divide training's: its shard
then has all rows of training's. Two pools have a copy each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cached_property
from math import ceil

from rollplex.memory.contract import step_records
from rollplex.memory.plan import MemoryPlan, plan_under, smallest_cap, unplanned
from rollplex.memory.records import MemoryRecord, ObjectClass, Policy, held_in
from rollplex.memory.step_shape import Hardware as CopyRates
from rollplex.memory.step_shape import StepShape
from rollplex.memory.timeline import SERIAL, STREAM, TIMELINES, Timeline
from rollplex.planner.divided import divided
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware
from rollplex.planner.parallel import Parallel
from rollplex.planner.workload import Arrangement
from rollplex.schedule.spec import REFERENCE, Phase

# A unit is scored and trained on while others are; every other pool trains phase by phase.
_POOL_TIMELINES = {"rolloutpipe": STREAM}
_ROLLOUT_WEIGHTS = "actor weights, rollout layout"
_ENGINE = "rollout "  # how the records of the cache and the workspace begin
_TRAINING_POOL, _ROLLOUT_POOL, _REFERENCE_POOL = "training pool", "rollout pool", "reference pool"


@dataclasses.dataclass(frozen=True)
class Need:
    """What one kind of device would hold, before anything is decided."""

    where: str  # "every device", "training pool", "rollout pool", "sampling and training", "reference pool"
    records: tuple[MemoryRecord, ...]
    timeline: Timeline

    @cached_property
    def naive_bytes(self) -> int:
        """Peak with every record kept."""
        return unplanned(self.records, self.timeline).peak_bytes

    @cached_property
    def least_bytes(self) -> int:
        """Below the peak of any plan: each record at its least in each segment, whichever choice that takes."""
        least = [0] * len(self.timeline.segments)
        for record in self.records:
            choices = [held_in(record, choice, self.timeline) for choice in record.choices]
            for number in range(len(least)):
                least[number] += min(held[number] for held in choices)
        return max(least)

    def plan(self, cap_bytes: int) -> MemoryPlan | None:
        """The plan of least exposed time under the cap; None: nothing fits."""
        naive = unplanned(self.records, self.timeline)
        if naive.peak_bytes <= cap_bytes:
            return naive
        if self.least_bytes > cap_bytes:
            return None
        return plan_under(self.records, self.timeline, cap_bytes)

    @cached_property
    def smallest_cap(self) -> int:
        """The least peak of any plan, in bytes."""
        return smallest_cap(self.records, self.timeline).cap_bytes


@dataclasses.dataclass(frozen=True)
class Fit:
    """A need and how it is met."""

    where: str
    plan: MemoryPlan

    @cached_property
    def naive(self) -> MemoryPlan:
        """The same with every record kept."""
        return unplanned(self.plan.records, self.plan.timeline)

    def at_peaks(self) -> dict[str, tuple[int, int]]:
        """Bytes of each record in the plan's fullest segment, and in the fullest where all is kept: both add up."""
        plan, naive = self.plan, self.naive
        return {
            record.name: (
                held_in(record, plan.choices[record.name], plan.timeline)[plan.fullest],
                held_in(record, record.keep, plan.timeline)[naive.fullest],
            )
            for record in plan.records
        }

    def peak_by_class(self) -> dict[str, int]:
        """Bytes by class of object in the fullest segment; they add up to the peak."""
        held, found = self.at_peaks(), dict[str, int]()
        for record in self.plan.records:
            found[str(record.kind)] = found.get(str(record.kind), 0) + held[record.name][0]
        return found

    @property
    def moved(self) -> dict[str, str]:
        """What is not simply kept: policy by record."""
        choices = self.plan.choices.items()
        return {name: str(choice.policy) for name, choice in choices if choice.policy is not Policy.KEEP}


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One kind of device of an arrangement. Parts with one `key` hold the same."""

    where: str
    timeline: Timeline
    plan: Arrangement

    @property
    def key(self) -> tuple[str, str, Parallel | None, Parallel | None]:
        """What its need depends on."""
        plan = self.plan
        sides: dict[str, tuple[Parallel | None, Parallel | None]] = {
            _TRAINING_POOL: (plan.train, None),
            _ROLLOUT_POOL: (plan.rollout, None),
            _REFERENCE_POOL: (plan.scoring, None),
        }
        return (self.where, self.timeline.name, *sides.get(self.where, (plan.train, plan.rollout)))

    def need(self, shape: StepShape, counts: ModelCounts, hardware: Hardware) -> Need:
        """What it holds. shape: of the step; its devices and degrees become the plan's."""
        plan, timeline = self.plan, self.timeline
        if self.where == _REFERENCE_POOL:
            assert plan.scoring is not None  # parts() makes one only where there is
            return self._need(_Records(shape, counts, hardware, plan, plan.scoring).of_reference(timeline))
        own = shape if plan.scoring is None else dataclasses.replace(shape, reference=False)
        records = _Records(own, counts, hardware, plan, plan.train)
        if self.where == _ROLLOUT_POOL:
            return self._need(tuple(map(_own_copy, records.of_rollout(timeline))))
        training = records.of_training(timeline)
        if self.where == _TRAINING_POOL:
            return self._need(tuple(_own_copy(record) for record in training if record.name != _ROLLOUT_WEIGHTS))
        rollout = [record for record in records.of_rollout(timeline) if record.name != _ROLLOUT_WEIGHTS]
        return self._need((*training, *rollout))

    def _need(self, records: tuple[MemoryRecord, ...]) -> Need:
        return Need(self.where, records, self.timeline)


def parts(plan: Arrangement) -> tuple[Part, ...]:
    """The kinds of device of `plan`."""
    if plan.pools:
        training = _POOL_TIMELINES.get(plan.schedule, SERIAL)
        return (Part(_TRAINING_POOL, training, plan), Part(_ROLLOUT_POOL, SERIAL, plan))
    if plan.scoring is None:
        return (Part("every device", TIMELINES[plan.schedule], plan),)
    # The reference works whenever groups are complete, and holds all that it works on.
    return (Part("sampling and training", SERIAL, plan), Part(_REFERENCE_POOL, SERIAL, plan))


def needs(shape: StepShape, counts: ModelCounts, hardware: Hardware, plan: Arrangement) -> tuple[Need, ...]:
    """What each kind of device holds under `plan`."""
    return tuple(part.need(shape, counts, hardware) for part in parts(plan))


@dataclasses.dataclass(frozen=True, slots=True)
class _Records:
    shape: StepShape
    counts: ModelCounts
    hardware: Hardware
    plan: Arrangement
    train: Parallel  # of the devices whose passes are counted

    def of_training(self, timeline: Timeline) -> list[MemoryRecord]:
        """Weights in both layouts, and all that training holds."""
        train, rollout = self.train, self.plan.rollout
        # Pools: the rollout's degree has no say; training's own keeps the counts of the other pool out of the way.
        sampling = train.tensor if self.plan.pools else rollout.tensor
        shape = self._shape(train.tensor * train.data, train.tensor, sampling)
        return [record for record in self._counted(shape, timeline) if not record.name.startswith(_ENGINE)]

    def of_rollout(self, timeline: Timeline) -> list[MemoryRecord]:
        """Weights in the rollout's layout, cache and workspace."""
        rollout = self.plan.rollout
        shape = self._shape(rollout.tensor * rollout.data, rollout.tensor, rollout.tensor)
        held = self._counted(shape, timeline)
        return [record for record in held if record.name.startswith((_ENGINE, _ROLLOUT_WEIGHTS))]

    def of_reference(self, timeline: Timeline) -> tuple[MemoryRecord, ...]:
        """The reference's weights and boundaries, and of all that a pass needs what its own phases hold."""
        train = self.train
        shape = self._shape(train.tensor * train.data, train.tensor, train.tensor)
        found = []
        for record in self._counted(shape, timeline):
            if record.name.startswith("reference "):
                found.append(record)
            elif record.kind is ObjectClass.PHASE_LOCAL and set(REFERENCE) & set(record.uses):
                found.append(_of_phases(record, REFERENCE))
        return tuple(map(_own_copy, found))

    def _shape(self, devices: int, train_tp: int, rollout_tp: int) -> StepShape:
        return dataclasses.replace(self.shape, devices=devices, train_tp=train_tp, rollout_tp=rollout_tp)

    def _counted(self, shape: StepShape, timeline: Timeline) -> tuple[MemoryRecord, ...]:
        device = self.hardware
        rates = CopyRates(device.host_bandwidth, device.byte_rate, device.matmul_rate)
        batches = ceil(shape.train_prompts * shape.generations * shape.response_tokens / shape.response_batch)
        return divided(
            step_records(shape, rates, timeline),
            self.counts,
            self.train,
            self.plan.rollout,
            shard_optimizer=shape.shard_optimizer,
            micro_batches=batches,
        )


def _of_phases(record: MemoryRecord, phases: Collection[Phase]) -> MemoryRecord:
    """What is left of a workspace on a device that runs `phases` alone."""
    choices = tuple(
        dataclasses.replace(choice, held={phase: size for phase, size in choice.held.items() if phase in phases})
        for choice in record.choices
    )
    uses = tuple(phase for phase in record.uses if phase in phases)
    return dataclasses.replace(record, nbytes=max(choices[0].held.values(), default=0), uses=uses, choices=choices)


def _own_copy(record: MemoryRecord) -> MemoryRecord:
    """Without views of a backing that the device does not have."""
    choices = tuple(choice for choice in record.choices if choice.policy is not Policy.REBUILD)
    return dataclasses.replace(record, choices=choices)
