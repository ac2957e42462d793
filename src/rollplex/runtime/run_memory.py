"""The memory plan of a run in this process: made before it starts, carried out while it goes on, judged by a ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Literal

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.allocations import MemoryTrace
from rollplex.memory.contract import step_records
from rollplex.memory.host_copies import HostCopies
from rollplex.memory.ledger import Ledger, ledger_of
from rollplex.memory.plan import MemoryPlan, plan_memory, unplanned
from rollplex.memory.records import Policy as Held
from rollplex.memory.residency import Residency
from rollplex.memory.step_shape import StepShape
from rollplex.memory.timeline import TIMELINES, timeline_of
from rollplex.models.policy import Policy
from rollplex.models.shapes import ModelShape
from rollplex.planner.memory import GIB, memory_hardware, step_shape, step_timeline
from rollplex.schedule.spec import Phase
from rollplex.trace import Span
from rollplex.train.reference import Reference
from rollplex.types import Group
from rollplex.weights.bind import shape_of_model

_REFERENCE, _OPTIMIZER, _PREFIXES = "reference weights", "optimizer state", "prefix activations"
_VISION = "cached vision features"


@dataclasses.dataclass(frozen=True, slots=True)
class RunMemory:
    """What a run's plan asks of its parts."""

    model: ModelShape
    plan: MemoryPlan | None  # None: no cap, everything stays
    prefix_activations: Literal["graph", "checkpoint", "recompute"]
    cache_vision: bool = True  # keep features of towers that stand still
    host_chunk_bytes: int | None = None  # of optimizer state in host memory; None: it stays on the device
    residency: Residency | None = None  # moves the objects that the plan moves

    def moving(self, reference: Reference | None) -> RunMemory:
        """With the residency of `reference`, where the plan moves it."""
        if self.plan is None or reference is None or self.plan.choices[_REFERENCE].policy is Held.KEEP:
            return self
        model = reference.policy.model
        copies = HostCopies(_REFERENCE, [*model.parameters(), *model.buffers()], read_only=True)
        return dataclasses.replace(self, residency=Residency(self.plan, {_REFERENCE: copies}))


def run_memory(config: Config, policy: Policy) -> RunMemory:
    """The plan of `config`'s run of `policy` under `memory.cap_gib`. Raises ConfigError when no plan fits."""
    model = shape_of_model(policy.model)
    cap, own = config.memory.cap_gib, config.train.prefix_activations
    if cap is None:
        return RunMemory(model, None, own)
    timeline = step_timeline(config)
    shape = dataclasses.replace(step_shape(config), model=model)
    plan = plan_memory(step_records(shape, memory_hardware(config), timeline), timeline, int(cap * GIB))
    chunk = {Held.KEEP: None, Held.OFFLOAD: 1 << 62, Held.STREAM: config.memory.stream_chunk_mib << 20}
    how = plan.choices[_PREFIXES]
    return RunMemory(
        model,
        plan,
        own if how.policy is Held.KEEP else "checkpoint" if how.detail == "checkpoint" else "recompute",
        _VISION not in plan.choices or plan.choices[_VISION].policy is Held.KEEP,
        chunk[plan.choices[_OPTIMIZER].policy],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """What was seen of one step."""

    groups: Sequence[Group]
    spans: Sequence[Span]
    trace: MemoryTrace
    overlapped: bool  # passes ran beside decoding
    cached_vision_bytes: int  # what the cache of vision features has come to


def step_ledger(config: Config, memory: RunMemory, step: Counted) -> Ledger:
    """Planned and measured bytes of one step. Planned: for this step's own mean lengths, hence its sums of tokens, each
    object held as the run's plan says."""
    timeline = timeline_of(config.schedule.name, overlapped=step.overlapped)
    records = step_records(_shape(config, memory, step), memory_hardware(config), timeline, varied=False)
    plan = unplanned(records, timeline)
    if memory.plan is not None:
        for record in (record for record in plan.records if record.name in memory.plan.choices):
            wanted = memory.plan.choices[record.name]
            same = [c for c in record.choices if c.policy is wanted.policy]
            if record.name == _PREFIXES and wanted.policy is not Held.KEEP:
                same = [c for c in same if c.detail == wanted.detail]
            plan = plan.replaced(record.name, same[0])
    measured: dict[Phase, int] = {}
    for span in step.spans:
        if span.name in _MEASURED:
            phase = Phase(span.name)
            measured[phase] = max(measured.get(phase, 0), step.trace.peak_within(span.start_s, span.end_s))
    return ledger_of(plan, measured, step.trace.peak_bytes, step.trace.left_bytes)


def _shape(config: Config, memory: RunMemory, step: Counted) -> StepShape:
    specs = [group.spec for group in step.groups]
    lengths = [len(response.token_ids) for group in step.groups for response in group.responses]
    prompt = ceil(fmean(spec.num_tokens for spec in specs))
    counted = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": prompt})})
    return dataclasses.replace(
        step_shape(counted),
        model=memory.model,
        prompts=len(specs),
        visual_tokens=ceil(fmean(int((spec.token_types > 0).sum()) for spec in specs)),
        response_tokens=ceil(fmean(lengths)),
        cached_vision_bytes=step.cached_vision_bytes,
    )


def check_memory_options(config: Config, processes: int) -> None:
    """Raises ConfigError for a run whose bytes cannot be counted, though an option asks for it."""
    if config.run.memory_steps:
        _check(config, "run.memory_steps", processes)
    if config.memory.cap_gib is not None:
        _check(config, "memory.cap_gib", processes)


# Engines take their weights when they are opened, within another phase's time.
_MEASURED = frozenset(phase for phase in Phase if phase is not Phase.PUBLISH)


def _check(config: Config, option: str, processes: int) -> None:
    """Raises ConfigError, naming `option`, where bytes of this process cannot be counted."""
    reasons = {
        f"{processes} processes run it": processes > 1,
        "memory.devices is above 1, but a run is planned for this one process": config.memory.devices > 1,
        "model.lora is set": config.model.lora is not None,
        "train.share_prefix is off": not config.train.share_prefix,
        "rollout.engine is not local: its memory is its own": config.rollout.engine != "local",
        "algorithm.dynamic_sampling is resample: its rounds hold as many prefixes as they happen to need": (
            config.algorithm.dynamic_sampling == "resample"
        ),
        "several optimizer steps per rollout keep prefixes of other kinds": (
            config.algorithm.num_iterations * config.algorithm.steps_per_generation > 1
        ),
        f"which phases run at once under schedule.name {config.schedule.name} is not known": (
            config.schedule.name not in TIMELINES
        ),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(f"{option} needs a step whose memory can be counted, but {'; '.join(found)}; leave it out")
