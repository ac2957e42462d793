"""The memory table of `rollplex plan`: what a step would hold on one device, naive and planned (docs/memory.md)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, Literal

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.contract import VISION_CACHE_BYTES, step_records
from rollplex.memory.plan import MemoryPlan, plan_memory, smallest_cap, unplanned
from rollplex.memory.records import MemoryRecord, Policy, held_in
from rollplex.memory.step_shape import Hardware, StepShape
from rollplex.memory.timeline import Timeline, timeline_of
from rollplex.models.shapes import ModelShape, shape_of

GIB = 1 << 30
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_MODES: tuple[Literal["graph", "checkpoint", "recompute"], ...] = ("graph", "checkpoint", "recompute")


def memory_section(config: Config) -> dict[str, Any]:
    """Naive and planned peak, every record with its lifetime and policy, and the bytes of every segment of a step.

    Naive: every object is kept, both weight layouts are copies of their own, the engine never sleeps. `naive_readings`
    has the same under every combination of three choices that descriptions of such a system seldom state.
    Raises ConfigError for a recipe that cannot be counted, or when no plan fits under `memory.cap_gib`, ModelError for
    a model whose sizes are not known.
    """
    memory, shape = config.memory, step_shape(config)
    refuse_experts(shape.model, "memory")
    timeline = step_timeline(config)
    hardware = memory_hardware(config)
    records = step_records(shape, hardware, timeline)
    naive = unplanned(records, timeline)
    plan = naive if memory.cap_gib is None else plan_memory(records, timeline, int(memory.cap_gib * GIB))
    least = smallest_cap(records, timeline)
    readings = []
    for mode, sharded, sequence in itertools.product(_MODES, (True, False), (True, False)):
        other = dataclasses.replace(shape, activations=mode, shard_optimizer=sharded, sequence_parallel=sequence)
        peak = unplanned(step_records(other, hardware, timeline), timeline).peak_bytes
        words = {"prefix_activations": mode, "shard_optimizer": sharded, "sequence_parallel": sequence}
        readings.append({**words, "naive_gib": _gib(peak)})
    return {
        "schedule": timeline.name,
        "cap_gib": memory.cap_gib,
        "naive_gib": _gib(naive.peak_bytes),
        "planned_peak_gib": _gib(plan.peak_bytes),
        "smallest_cap_gib": _gib(least.cap_bytes),
        "smallest_cap_binding": list(least.binding),
        "exposed_s": plan.exposed_s,
        "host_gib": _gib(sum(choice.host_bytes for choice in plan.choices.values())),
        "segments": [
            {"phases": label, "naive_gib": _gib(before), "planned_gib": _gib(after)}
            for label, before, after in zip(timeline.labels, naive.segment_bytes, plan.segment_bytes, strict=True)
        ],
        "records": [_record(record, plan) for record in records],
        "removed_in_turn": list(_removed_in_turn(plan)),
        "naive_readings": readings,
    }


def memory_hardware(config: Config) -> Hardware:
    """What moving and recomputing cost on the devices that a recipe assumes."""
    memory = config.memory
    return Hardware(memory.host_link_gb_s * 1e9, memory.device_memory_gb_s * 1e9, memory.device_tflops * 1e12)


def memory_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Peaks, the table of records, and the segments of a step; in MiB where all is less than a GiB."""
    unit, scale = ("GiB", 1) if facts["naive_gib"] >= 1 else ("MiB", 1024)

    def size(gib: float) -> str:
        return f"{gib * scale:.2f}"

    cap = "no cap" if facts["cap_gib"] is None else f"cap {size(facts['cap_gib'])}"
    yield f"per device, {unit}, schedule {facts['schedule']}, {cap}"
    yield f"{size(facts['naive_gib']):>8}  naive: everything kept, a copy of the weights for each side"
    price = f"{facts['exposed_s']:.3f} s a step and {size(facts['host_gib'])} {unit} of host memory"
    yield f"{size(facts['planned_peak_gib']):>8}  planned, at {price}"
    least = ceil(facts["smallest_cap_gib"] * scale * 100) / 100  # rounded down it would not work
    yield f"{least:>8.2f}  smallest cap that works ({', '.join(facts['smallest_cap_binding'])})"
    yield ""
    yield f"{'object':<32}{unit:>8}{'planned':>9}{'s/step':>8}  {'lives':<35}policy"
    for record in facts["records"]:
        lives = f"{record['producer']} .. {record['last_use']}"
        policy = " ".join(filter(None, (record["policy"], record["policy_detail"] and f"({record['policy_detail']})")))
        numbers = f"{size(record['gib']):>8}{size(record['planned_gib']):>9}{record['restore_s']:>8.3f}"
        yield f"{record['name']:<32}{numbers}  {lives:<35}{policy}"
    yield ""
    yield f"{'naive':>8} {'planned':>8}  while"
    for segment in facts["segments"]:
        yield f"{size(segment['naive_gib']):>8} {size(segment['planned_gib']):>8}  {segment['phases']}"
    for removed in facts["removed_in_turn"]:
        yield f"without {removed['policy']} of {removed['record']}: {size(removed['peak_gib'])}"


def step_timeline(config: Config) -> Timeline:
    """Which phases of a recipe's step may run at once. Raises ConfigError for a schedule of which that is not known."""
    return timeline_of(config.schedule.name, overlapped=config.schedule.overlap != "off")


def step_shape(config: Config) -> StepShape:
    """The sizes of a recipe's step. Raises ConfigError, naming the option, for what cannot be counted."""
    memory, sharing, rollout, train = config.memory, config.sharing, config.rollout, config.train
    if config.model.lora is not None:
        raise ConfigError(
            "the memory plan counts full fine-tuning, found model.lora; set model.lora=null to plan without"
        )
    if not train.share_prefix:
        raise ConfigError("the memory plan counts steps that share prefixes, found train.share_prefix off; needed on")
    if config.data.max_prompt_tokens is None:
        raise ConfigError("the memory plan needs data.max_prompt_tokens: how long a prompt, media expanded, may be")
    for name, degree in (("train_tp", sharing.train_tp), ("rollout_tp", sharing.rollout_tp)):
        if memory.devices % degree:
            raise ConfigError(
                f"memory.devices {memory.devices} is not a multiple of sharing.{name} {degree}; needed whole replicas"
            )
    prompt = config.data.max_prompt_tokens
    return StepShape(
        model=shape_of(config.model),
        dtype_bytes=_DTYPE_BYTES[config.model.dtype],
        devices=memory.devices,
        train_tp=sharing.train_tp,
        rollout_tp=sharing.rollout_tp,
        prompts=rollout.prompts_per_step,
        generations=rollout.num_generations,
        prompt_tokens=prompt,
        visual_tokens=round(memory.visual_share * prompt),
        response_tokens=rollout.max_completion_length,
        micro_batch_tokens=train.micro_batch_tokens,
        activations=train.prefix_activations,
        reference=config.algorithm.beta > 0,
        vision_trained=not config.model.freeze_vision,
        # In one process the local engine reads the policy itself.
        separate_engine=memory.devices > 1,
        layouts_differ=sharing.train_layout != sharing.rollout_layout,
        sequence_parallel=memory.sequence_parallel,
        shard_optimizer=memory.shard_optimizer,
        stream_chunk_bytes=memory.stream_chunk_mib << 20,
        kernels=memory.kernels,
        decode_rows=rollout.max_decode_rows if memory.devices == 1 and rollout.engine == "local" else None,
        local_engine=memory.devices == 1 and rollout.engine == "local",
        # Every prompt's features stay until the cache is full.
        cached_vision_bytes=VISION_CACHE_BYTES if memory.devices == 1 and _tower_stands_still(config) else 0,
        unit_tokens=config.schedule.unit_tokens if memory.devices == 1 else None,
        chunk_tokens=config.schedule.chunk_tokens if memory.devices == 1 else None,
    )


def _tower_stands_still(config: Config) -> bool:
    """Whether a vision tower never changes: the reference's, or a frozen one."""
    return config.algorithm.beta > 0 or config.model.freeze_vision


def _record(record: MemoryRecord, plan: MemoryPlan) -> dict[str, Any]:
    choice = plan.choices[record.name]
    held = held_in(record, choice, plan.timeline)
    return {
        "name": record.name,
        "class": str(record.kind),
        "bytes": record.nbytes,
        "gib": _gib(record.nbytes),
        "formula": record.formula,
        "producer": str(record.producer),
        "first_use": str(record.first_use),
        "last_use": str(record.last_use),
        "interval": [label for label, size in zip(plan.timeline.labels, held, strict=True) if size],
        "policy": str(choice.policy),
        "policy_detail": choice.detail,
        "planned_gib": _gib(max(held)),
        "restore_s": choice.restore_s,
        "allowed": [f"{other.policy}: {other.detail}".rstrip(": ") for other in record.choices],
    }


def _removed_in_turn(plan: MemoryPlan) -> Iterator[dict[str, Any]]:
    """The peak when one record of the plan is kept after all."""
    for record in plan.records:
        choice = plan.choices[record.name]
        if choice.policy is not Policy.KEEP:
            peak = plan.replaced(record.name, record.keep).peak_bytes
            yield {"record": record.name, "policy": str(choice.policy), "peak_gib": _gib(peak)}


def refuse_experts(shape: ModelShape, what: str) -> None:
    """Raises ConfigError for a mixture of experts, whose own sizes only the search counts."""
    if shape.text.experts is not None:
        raise ConfigError(
            f"the {what} table of a recipe counts dense models, found {shape.text.experts.count} experts (model.path); "
            "give --gpus and --hardware: the search counts and spreads them"
        )


def _gib(nbytes: int) -> float:
    return nbytes / GIB
