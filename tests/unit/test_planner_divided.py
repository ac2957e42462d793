"""What pipeline, context and expert parallelism leave of the memory records."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollplex.memory.contract import step_records
from rollplex.memory.records import MemoryRecord
from rollplex.memory.step_shape import Hardware, StepShape
from rollplex.memory.timeline import TIMELINES
from rollplex.models.shapes import Experts, ModelShape, shape_from_hf
from rollplex.planner.divided import divided
from rollplex.planner.flops import ModelCounts
from rollplex.planner.parallel import Parallel

TEXT: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
                        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1024}  # fmt: skip
SHAPE: ModelShape = shape_from_hf({"model_type": "qwen3_vl", "text_config": TEXT}, "test")
TIMELINE = TIMELINES["rollplex"]


def records(train_tp: int = 2, replicas: int = 4, vision_trained: bool = True) -> tuple[MemoryRecord, ...]:
    step = StepShape(
        model=SHAPE, dtype_bytes=2, devices=train_tp * replicas, train_tp=train_tp, rollout_tp=1, prompts=8,
        generations=4, prompt_tokens=512, visual_tokens=400, response_tokens=64, micro_batch_tokens=512,
        activations="graph", reference=True, vision_trained=vision_trained, separate_engine=True, layouts_differ=False,
        sequence_parallel=True, shard_optimizer=True, stream_chunk_bytes=1 << 20,
    )  # fmt: skip
    return step_records(step, Hardware(50e9, 3e12, 4e14), TIMELINE)


def by_name(train: Parallel, rollout: Parallel = Parallel(data=8), experts: Experts | None = None) -> dict[str, int]:  # noqa: B008
    found = divided(records(), ModelCounts(SHAPE, 2, experts), train, rollout, shard_optimizer=True, micro_batches=2)
    return {record.name: record.nbytes for record in found}


def test_tensor_and_data_alone_change_nothing() -> None:
    flat = Parallel(tensor=2, data=4)
    assert (
        divided(records(), ModelCounts(SHAPE), flat, Parallel(data=8), shard_optimizer=True, micro_batches=2)
        == records()
    )


def test_what_each_axis_leaves() -> None:
    flat = by_name(Parallel(tensor=2, data=4))
    deep = by_name(Parallel(tensor=2, data=4, pipeline=4))
    ring = by_name(Parallel(tensor=2, data=4, context=2))
    share = {name: deep[name] / flat[name] for name in flat}
    assert share["actor boundary"] == share["prefix activations"] == pytest.approx(0.25, rel=1e-3)
    assert share["response activations"] == pytest.approx(0.5, rel=1e-3)  # two micro-batches in flight, not four
    counts = ModelCounts(SHAPE)
    kept = sum(Parallel(tensor=2, pipeline=4).parameters(counts)) / sum(Parallel(tensor=2).parameters(counts))
    assert share["gradients"] == share["optimizer state"] == pytest.approx(kept, rel=1e-3)
    assert deep["rollout KV cache"] == flat["rollout KV cache"]
    halves = ("actor boundary", "prefix activations", "response activations", "logits", "optimizer state")
    assert all(ring[name] / flat[name] == pytest.approx(0.5, rel=1e-3) for name in halves)
    assert ring["gradients"] == flat["gradients"]


def test_rollout_engines_have_a_plan_of_their_own() -> None:
    staged = by_name(Parallel(tensor=2, data=4), Parallel(pipeline=2, data=4))
    assert staged["rollout KV cache"] == by_name(Parallel(tensor=2, data=4))["rollout KV cache"] // 2


def test_experts_add_weights_and_spread_them() -> None:
    dense = by_name(Parallel(tensor=2, data=4))
    here = by_name(Parallel(tensor=2, data=4), experts=Experts(8, 2))
    spread = by_name(Parallel(tensor=2, data=4, expert=4), experts=Experts(8, 2))
    counts = ModelCounts(SHAPE, 2, Experts(8, 2))
    assert here["gradients"] - spread["gradients"] == pytest.approx(counts.expert_parameters / 2 * 3 / 4 * 4, rel=1e-3)
    assert here["response activations"] > dense["response activations"]


def test_every_choice_shrinks_with_its_record() -> None:
    plan = Parallel(tensor=2, data=4, pipeline=2)
    found = divided(records(), ModelCounts(SHAPE), plan, Parallel(data=8), shard_optimizer=True, micro_batches=8)
    before = {record.name: record for record in records()}
    for record in found:
        for now, then in zip(record.choices, before[record.name].choices, strict=True):
            assert now.policy is then.policy and now.restore_s <= then.restore_s
            assert all(now.held[phase] <= then.held[phase] for phase in then.held)
    assert dataclasses.asdict(found[0]).keys() == dataclasses.asdict(records()[0]).keys()


def test_a_frozen_tower_has_no_gradients_on_any_stage() -> None:
    """What is trained is the language model alone: a pipeline divides all of it."""
    counts, plan = ModelCounts(SHAPE, 2, vision_trained=False), Parallel(tensor=2, data=4, pipeline=4)
    found = divided(
        records(vision_trained=False), counts, plan, Parallel(data=8), shard_optimizer=True, micro_batches=2
    )
    held = {record.name: record.nbytes for record in found}
    text = Parallel(tensor=2, pipeline=4).parameters(counts)[0]
    assert held["gradients"] == pytest.approx(4 * text, rel=1e-6)
    assert held["optimizer state"] == pytest.approx(12 * text / 4, rel=1e-6)


def test_the_state_of_experts_is_shared_among_their_own_copies() -> None:
    """Four replicas, each with a quarter of the experts: nobody else has their state."""
    experts = Experts(8, 2)
    held = by_name(Parallel(tensor=2, data=4, expert=4), experts=experts)
    counts = ModelCounts(SHAPE, 2, experts)
    own = counts.expert_parameters / 2 / 4
    rest = sum(Parallel(tensor=2, data=4, expert=4).parameters(counts)) - own
    assert held["gradients"] == pytest.approx(4 * (rest + own), rel=1e-6)
    assert held["optimizer state"] == pytest.approx(12 * (rest / 4 + own), rel=1e-6)


def test_a_layer_of_experts_needs_the_room_of_those_that_are_active() -> None:
    dense, mixed = (by_name(Parallel(tensor=2, data=4), experts=e) for e in (None, Experts(8, 4)))
    for name in ("layer workspace", "rollout workspace", "response activations"):
        assert mixed[name] > 1.2 * dense[name], name
