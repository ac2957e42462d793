"""The records of a step, and the memory section of a plan, on the published contract and on small shapes."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.contract import MAX_LOGIT_ELEMENTS, VISION_CACHE_BYTES, step_records
from rollplex.memory.plan import plan_memory, smallest_cap, unplanned
from rollplex.memory.records import MemoryRecord, Policy
from rollplex.memory.step_shape import Hardware, StepShape
from rollplex.memory.timeline import ROLLPLEX, SERIAL, STREAM, STREAM_CLOSED, Timeline
from rollplex.models import logprobs, policy
from rollplex.planner.memory import memory_lines, memory_section, step_shape
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.schedule.spec import Phase

GIB = 1 << 30
HARDWARE = Hardware(host_link=50e9, device_memory=3.35e12, flops=4e14)


def _published(*changes: str) -> Config:
    """Qwen2.5-VL-32B, 32 x 80 GB, train TP8, rollout TP4, 32 prompts x 8, 8K + 2K tokens (research/rl_systems.md 1)."""
    return load_config(packaged_recipe("rollplex_32b"), changes)


def _by_name(records: tuple[MemoryRecord, ...]) -> dict[str, MemoryRecord]:
    return {record.name: record for record in records}


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        (("schedule.name=rollplex",), "rollplex"),
        (("schedule.name=rollplex", "schedule.overlap=off"), "serial"),
        (("schedule.name=stream", "schedule.overlap=off"), "stream, window closed"),
    ],
)
def test_memory_is_counted_for_the_schedule_that_a_run_would_have(changes: tuple[str, ...], counted: str) -> None:
    assert memory_section(_published(*changes))["schedule"] == counted


def test_memory_of_a_schedule_whose_phases_are_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule.name is 'rolloutpipe'.*needed one of serial, rollplex, stream"):
        memory_section(_published("schedule.name=rolloutpipe"))


def test_published_terms() -> None:
    """Sizes of research/rl_systems.md 2.5, in GiB; that table leaves the vision tower (689 M parameters) out."""
    records = _by_name(step_records(step_shape(_published()), HARDWARE, ROLLPLEX))
    tower = 689_000_000
    for name, gib, vision_bytes in (
        ("actor weights, rollout layout", 15.26, 2),
        ("actor weights, training layout", 7.63, 2),
        ("reference weights", 7.63, 2),
        ("gradients", 15.26, 4),
        ("optimizer state", 45.77, 12),
        ("rollout KV cache", 6.0, 0),
        ("reference boundary", 2.0, 0),
        ("actor boundary", 2.0, 0),
    ):
        assert records[name].nbytes / GIB == pytest.approx(gib + vision_bytes * tower / GIB, rel=2e-3), name
    kept = records["prefix activations"].keep
    # Layer inputs of 64 layers and the tower's features, which enter the first of them.
    assert kept.held[Phase.REF_RESPONSE] == 40 * GIB * 65 // 64
    rebuilt = records["actor weights, training layout"].choices[1]
    assert rebuilt.policy is Policy.REBUILD
    assert rebuilt.held[Phase.DECODE] / GIB == pytest.approx(0.547, abs=1e-3)


def test_published_contract_fits_and_every_policy_is_needed() -> None:
    section = memory_section(_published())
    assert section["planned_peak_gib"] <= 80 < section["naive_gib"]
    assert max(s["planned_gib"] for s in section["segments"]) == section["planned_peak_gib"]
    assert max(s["naive_gib"] for s in section["segments"]) == section["naive_gib"]
    assert len(section["removed_in_turn"]) == sum(r["policy"] != "keep" for r in section["records"]) > 0
    assert all(removed["peak_gib"] > 80 for removed in section["removed_in_turn"])
    assert json.loads(json.dumps(section)) == section


def test_published_naive_figure() -> None:
    """165 GiB is published without its terms. The literal reading comes near; others lie far off on both sides, so that
    this is agreement and no proof (docs/memory.md)."""
    section = memory_section(_published())
    assert section["naive_gib"] == pytest.approx(165, rel=0.1)
    readings = [r["naive_gib"] for r in section["naive_readings"]]
    assert len(readings) == 12 and section["naive_gib"] in readings
    assert min(readings) < 100 and max(readings) > 400
    assert sum(reading == pytest.approx(165, rel=0.1) for reading in readings) == 2


def test_published_policies_are_the_ones_that_are_needed() -> None:
    """At 80 GiB the cheapest plan is made of what the paper's notes list (research/rl_systems.md 1)."""
    section = memory_section(_published())
    assert {r["name"]: r["policy"] for r in section["records"] if r["policy"] != "keep"} == {
        "actor weights, training layout": "rebuild",
        "reference weights": "offload",
        "optimizer state": "stream in chunks",
        "rollout KV cache": "discard",
        "prefix activations": "recompute",
    }


def test_the_graph_of_the_whole_prefix_fits_nowhere() -> None:
    section = memory_section(_published("train.prefix_activations=graph"))
    assert next(r for r in section["records"] if r["name"] == "prefix activations")["policy"] == "recompute"
    assert section["naive_gib"] > 400
    assert section["host_gib"] > 45.8  # the optimizer's state


@st.composite
def _shapes(draw: st.DrawFn) -> StepShape:
    train, rollout = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (8, 4), (2, 8), (16, 4)]))
    replicas = draw(st.integers(1, 3))
    base = step_shape(_published())
    prompt = draw(st.integers(1, 9000))
    return dataclasses.replace(
        base,
        devices=max(train, rollout) * replicas,
        train_tp=train,
        rollout_tp=rollout,
        dtype_bytes=draw(st.sampled_from([2, 4, 8])),
        prompts=draw(st.integers(1, 40)),
        generations=draw(st.integers(1, 9)),
        prompt_tokens=prompt,
        visual_tokens=draw(st.integers(0, prompt)),
        response_tokens=draw(st.integers(1, 3000)),
        micro_batch_tokens=draw(st.integers(1, 20000)),
        activations=draw(st.sampled_from(["graph", "checkpoint", "recompute"])),
        reference=draw(st.booleans()),
        vision_trained=draw(st.booleans()),
        separate_engine=draw(st.booleans()),
        layouts_differ=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        shard_optimizer=draw(st.booleans()),
    )


@settings(max_examples=15)
@given(_shapes(), st.sampled_from([SERIAL, ROLLPLEX, STREAM, STREAM_CLOSED]), st.floats(0, 1))
def test_any_step(shape: StepShape, timeline: Timeline, share: float) -> None:
    records = step_records(shape, HARDWARE, timeline)
    assert len(_by_name(records)) == len(records)
    for record in records:
        assert record.nbytes == max(record.keep.held.values())
        for choice in record.choices:
            assert set(record.uses) <= set(choice.held)
            # A way to hold less never holds more than one pack's graph beyond the object itself.
            if record.name != "prefix activations":
                assert max(choice.held.values()) <= record.nbytes
    naive, least = unplanned(records, timeline), smallest_cap(records, timeline)
    cap = least.cap_bytes + int(share * (naive.peak_bytes - least.cap_bytes))
    assert plan_memory(records, timeline, cap).peak_bytes <= cap
    with pytest.raises(ConfigError, match=rf"\({least.cap_bytes} bytes\)"):
        plan_memory(records, timeline, least.cap_bytes - 1)


def test_scaling_laws() -> None:
    """What doubles when the step doubles, and what does not."""
    base = step_shape(_published())

    def size(name: str, shape: StepShape) -> int:
        return _by_name(step_records(shape, HARDWARE, ROLLPLEX))[name].nbytes

    twice = dataclasses.replace(base, prompts=64)
    assert size("actor boundary", twice) == 2 * size("actor boundary", base)
    assert size("rollout KV cache", twice) == 2 * size("rollout KV cache", base)
    assert size("boundary gradients", twice) == pytest.approx(size("boundary gradients", base), rel=1e-3)  # one h each
    assert size("response activations", twice) == size("response activations", base)
    budget = dataclasses.replace(base, micro_batch_tokens=4096)
    assert size("response activations", budget) == 2 * size("response activations", base)
    shards = dataclasses.replace(base, shard_optimizer=True)
    assert size("optimizer state", base) == pytest.approx(4 * size("optimizer state", shards), abs=4)
    full = dataclasses.replace(base, dtype_bytes=4)  # fp32 weights are their own masters
    assert size("optimizer state", full) / size("optimizer state", base) == pytest.approx(8 / 12, abs=1e-6)


def test_the_reference_and_a_second_copy_only_where_there_are_any() -> None:
    names = {r["name"] for r in memory_section(_published("algorithm.beta=0"))["records"]}
    assert not any("reference" in name for name in names)
    alone = _published("memory.devices=1", "memory.cap_gib=null", "train_tp=1", "rollout_tp=1")
    section = memory_section(alone)
    assert not any("training layout" in r["name"] for r in section["records"])
    assert section["planned_peak_gib"] == section["naive_gib"]


def test_equal_layouts_rebuild_nothing() -> None:
    shape = dataclasses.replace(step_shape(_published()), layouts_differ=False)
    record = _by_name(step_records(shape, HARDWARE, ROLLPLEX))["actor weights, training layout"]
    assert set(record.choices[1].held.values()) == {0}


def test_limits_are_those_of_the_code() -> None:
    assert VISION_CACHE_BYTES == policy.VISION_CACHE_BYTES
    assert MAX_LOGIT_ELEMENTS == logprobs.MAX_LOGIT_ELEMENTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.max_prompt_tokens=null", "needs data.max_prompt_tokens"),
        ("memory.devices=12", "memory.devices 12 is not a multiple of sharing.train_tp 8"),
        ("train.share_prefix=off", "found train.share_prefix off; needed on"),
        ("model.lora={}", "found model.lora"),
        ("memory.cap_gib=20", r"fits into 20.00 GiB: the smallest cap that works is \d+.\d+ GiB \(\d+ bytes\)"),
    ],
)
def test_refusals(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        memory_section(_published(change))


def test_lines_tell_the_facts() -> None:
    section = memory_section(_published())
    text = "\n".join(memory_lines(section))
    for record in section["records"]:
        assert f"{record['name']:<32}{record['gib']:8.2f}" in text
    assert f"{section['naive_gib']:.2f}  naive" in text and f"{section['planned_peak_gib']:.2f}  planned" in text
