"""Times of tasks: limits that can be worked out by hand, additivity, variants, bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from published_models import QWEN_32B
from rollplex.errors import ConfigError
from rollplex.models.shapes import Experts, ModelShape, shape_from_hf
from rollplex.planner.bounds import stages
from rollplex.planner.cost import Seconds, Side, StepCost, roofline
from rollplex.planner.decoding import Rows
from rollplex.planner.flops import EAGER, FUSED, ModelCounts
from rollplex.planner.hardware import Efficiency, Hardware, hardware
from rollplex.planner.load import GroupLoad, Prompt, video_prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.passes import Algorithm, passes
from rollplex.planner.publishing import colocated_bytes, disaggregated_bytes
from rollplex.planner.work import Work
from rollplex.schedule.scripted import ScriptedExecutor
from rollplex.schedule.serial import Serial
from rollplex.schedule.spec import Phase, PrefixMode, StepSpec, Task
from rollplex.schedule.step import Limits, run_step

IDEAL = Efficiency(matmul=1.0, attention=1.0, memory=1.0, link=1.0, kernel_s=0.0, decode_step_s=0.0)


def shape() -> ModelShape:
    return shape_from_hf(QWEN_32B, "test")


def ideal(name: str) -> Hardware:
    return dataclasses.replace(hardware(name), efficiency=IDEAL)


GRPO = Algorithm()


def step_cost(algorithm: Algorithm = GRPO, groups: int = 8, **options: Any) -> StepCost:
    counts, device = ModelCounts(shape()), hardware("h800")
    train, rollout = Side(counts, device, Parallel(tensor=8, data=4)), Side(counts, device, Parallel(tensor=4, data=8))
    prompt = video_prompt(8192, 8000, counts.shape.vision)
    loads = tuple(GroupLoad(prompt, (300 + 100 * g, 40, 200, 1)) for g in range(groups))
    return StepCost(train, rollout, algorithm, loads, **options)


def test_one_row_decodes_at_the_speed_of_its_weights() -> None:
    """32.76e9 parameters of 2 bytes over 4 x 3.35 TB/s, less the embedding, which is looked up."""
    side = Side(ModelCounts(shape()), ideal("h800"), Parallel(tensor=4))
    found = side.decode_step(Rows(1, 1, 1, 1))
    weights = 2 * (32_763_876_352 - 152064 * 5120)
    assert found.limit == "weights"
    assert found.weights == pytest.approx(weights / 4 / 3.35e12, rel=1e-3)


def test_many_long_contexts_are_bound_by_their_cache() -> None:
    side = Side(ModelCounts(shape()), ideal("h800"), Parallel(tensor=8))
    found = side.decode_step(Rows(64, 64, 64 * 32768, 64 * 32768))
    assert found.limit == "cache"
    assert found.cache == pytest.approx(64 * 32768 * (256 << 10) / 8 / 3.35e12)  # 256 KiB a token (research 2.5)


def test_a_long_prompt_is_bound_by_products() -> None:
    counts = ModelCounts(shape())
    found = roofline(counts.prefix([Prompt(8192)]), ideal("h100"))
    assert found.limit == "products"
    # Two operations per parameter and token; embedding and head do not run, nor does most of the last layer.
    layers = 32_763_876_352 - 2 * 152064 * 5120
    assert found.products == pytest.approx(2 * layers * 8192 / 989e12, rel=0.015)


def test_parts_add_up_and_scale() -> None:
    found = roofline(Work(1e12, 1e11, 1e9, 1e9, 1e12, 10), hardware("a100-80g"))
    assert found.products > 0 and found.weights == 0 and found.cache > 0 and found.attention == 0
    names = [f.name for f in dataclasses.fields(Seconds)]
    assert found.total == pytest.approx(sum(getattr(found, name) for name in names))
    assert (found + found).total == pytest.approx(2 * found.total) == pytest.approx(found.scaled(2).total)


def test_sharing_divides_prompt_work_by_the_group() -> None:
    group = GroupLoad(Prompt(4096), (100,) * 8)
    counts = ModelCounts(shape())

    def flops(mode: PrefixMode, *phases: Phase) -> float:
        algorithm = Algorithm(prefix=mode, activations="graph")
        return sum(p.text.flops for phase in phases for p in passes(phase, group, counts, algorithm))

    prefixes = (Phase.REF_PREFIX, Phase.ACTOR_PREFIX, Phase.PREFIX_BACKWARD)
    assert flops(PrefixMode.PER_RESPONSE, *prefixes) == 8 * flops(PrefixMode.SHARED, *prefixes)
    assert flops(PrefixMode.WHOLE, *prefixes) == 0
    every = (*prefixes, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE)
    # The split costs no operations of its own: 8 prompts apart are 8 whole sequences, save the last layer's and the
    # last tokens'.
    assert flops(PrefixMode.WHOLE, *every) == pytest.approx(flops(PrefixMode.PER_RESPONSE, *every), rel=0.03)


def test_a_pack_shares_weights_and_launches_and_a_micro_batch_reads_them_again() -> None:
    group, counts = GroupLoad(Prompt(500), (101,) * 8), ModelCounts(shape())

    def work(phase: Phase, **options: Any) -> Work:
        return passes(phase, group, counts, Algorithm(**options))[0].text

    alone, packed = work(Phase.REF_PREFIX), work(Phase.REF_PREFIX, pack_groups=4)
    assert (packed.flops, 4 * packed.weight_bytes) == (alone.flops, alone.weight_bytes)
    once, thrice = (work(Phase.ACTOR_RESPONSE, micro_batch_tokens=budget) for budget in (800, 300))
    assert (thrice.flops, thrice.kernels) == (once.flops, 3 * once.kernels)
    assert work(Phase.ACTOR_RESPONSE, micro_batch_tokens=800, pack_groups=2).kernels == once.kernels  # 2 / 2


def test_ppo_adds_a_critic_wherever_it_runs() -> None:
    grpo, ppo = step_cost(), step_cost(Algorithm(kind="ppo"))
    for phase in (Phase.REF_PREFIX, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD):
        assert 1.5 < ppo.task(Task(phase, 0)).total / grpo.task(Task(phase, 0)).total < 2.5
    for phase in (Phase.PREFILL, Phase.DECODE, Phase.ACTOR_PREFIX):
        assert ppo.task(Task(phase, 0)) == grpo.task(Task(phase, 0))
    assert ppo.optimizer.total == pytest.approx(2 * grpo.optimizer.total)


def test_old_log_probs_and_no_reference() -> None:
    group = GroupLoad(Prompt(100), (5, 5))
    counts = ModelCounts(shape())

    def names(algorithm: Algorithm, phase: Phase) -> list[str]:
        return [p.name for p in passes(phase, group, counts, algorithm)]

    assert names(Algorithm(reference=False), Phase.REF_PREFIX) == []
    assert names(Algorithm(reference=False, old_logps=True), Phase.REF_RESPONSE) == ["actor scoring"]
    assert names(Algorithm(), Phase.REWARD) == names(Algorithm(), Phase.OPTIMIZER) == []


def test_durations_drive_a_schedule() -> None:
    cost = step_cost(reward_s=0.25)
    spec = StepSpec(8, reference=True)
    executor = ScriptedExecutor(cost.durations())
    run_step(Serial(), executor, spec, Limits())
    assert set(executor.finished) == set(spec.tasks)
    assert cost.task(Task(Phase.REWARD, 3)).total == 0.25
    # Eight engines, eight groups: each group decodes alone, the longest the longest.
    ends = [cost.task(Task(Phase.DECODE, g)).total for g in range(8)]
    assert ends == sorted(ends) and ends[6] - ends[5] == pytest.approx((ends[7] - ends[0]) / 7, rel=0.01)


def test_groups_of_one_engine_share_its_weights() -> None:
    alone, together = step_cost(groups=8), step_cost(groups=16)
    for group in range(8):
        slower = together.task(Task(Phase.DECODE, group)).total / alone.task(Task(Phase.DECODE, group)).total
        assert 1.0 < slower < 1.1  # twice the rows, bound by weights all the same


def test_published_volume_of_the_32b() -> None:
    """research/rl_systems.md 2.6: (t - s) / (t s) M = 7.6 GiB received at TP 8 and 4; norms and the tower are whole."""
    counts = ModelCounts(shape())
    found = colocated_bytes(counts, Parallel(tensor=8, data=4), Parallel(tensor=4, data=8))
    assert round(found / 2**30, 2) == 7.63
    assert colocated_bytes(counts, Parallel(tensor=8), Parallel(tensor=8)) == 0
    assert disaggregated_bytes(counts, Parallel(tensor=4)) / 2**30 == pytest.approx(15.26 + 1.28, abs=0.02)


def test_a_pipeline_has_bubbles_and_divides_weights() -> None:
    counts, device = ModelCounts(shape()), ideal("h100")
    flat, deep = Side(counts, device, Parallel()), Side(counts, device, Parallel(pipeline=4))
    one = passes(Phase.ACTOR_PREFIX, GroupLoad(Prompt(4096), (10,)), counts, Algorithm())[0]
    assert deep.seconds(one, 4).products == pytest.approx(flat.seconds(one).products / 4 * 7 / 4)
    assert deep.seconds(one, 400).products == pytest.approx(flat.seconds(one).products / 4, rel=0.01)


def test_a_plan_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor parallelism 7 does not divide 40 query heads"):
        Side(ModelCounts(shape()), hardware("h100"), Parallel(tensor=7))
    with pytest.raises(ConfigError, match="divisor"):
        Parallel(data=4, expert=3)
    with pytest.raises(ConfigError, match="h900"):
        hardware("h900")


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_estimate_lies_within_the_bound(kind: Any) -> None:
    for stage in stages(step_cost(Algorithm(kind=kind), groups=32)):
        assert 0 <= stage.lower_s <= stage.estimate_s * (1 + 1e-9), stage
        assert stage.estimate_s <= stage.upper_s * (1 + 1e-9), stage


@settings(max_examples=20)
@given(
    lengths=st.lists(st.lists(st.integers(1, 3000), min_size=4, max_size=4), min_size=8, max_size=8),
    tensor=st.sampled_from([2, 4, 8]),
    places=st.none() | st.integers(1, 40),
)
def test_generation_stays_within_the_bound(lengths: list[list[int]], tensor: int, places: int | None) -> None:
    """One engine, so that no load is uneven: the bound then holds for any lengths, and for any number of places."""
    counts, device = ModelCounts(shape()), hardware("h800")
    side = Side(counts, device, Parallel(tensor=tensor))
    groups = tuple(GroupLoad(Prompt(500), tuple(row)) for row in lengths)
    generation = stages(StepCost(side, side, Algorithm(), groups, max_rows=places))[0]
    assert generation.lower_s <= generation.estimate_s * (1 + 1e-6)
    assert generation.estimate_s <= generation.upper_s * (1 + 1e-6)


def test_eager_code_calls_attention_per_length_of_window_and_writes_scores_out() -> None:
    fused, eager = (ModelCounts(shape(), eager=eager) for eager in (False, True))
    prompts = [Prompt(900, ((2, 20, 16),))]  # two frames of 20 x 16 patches: 8 x 8 windows, 3 x 2 of them a frame
    one, other = fused.vision(prompts), eager.vision(prompts)
    # Four of 32 blocks see whole frames; the others windows of 8 x 8 and of 4 x 8.
    assert one.kernels == 32 * (FUSED.block + 1) + 3
    assert other.kernels == 32 * EAGER.block + (28 * 2 + 4) * EAGER.call + 3
    assert dataclasses.replace(other, kernels=one.kernels) == one
    steps = [counts.decode_step(4, 4000, 1000) for counts in (fused, eager)]
    assert steps[1].stream_bytes - steps[0].stream_bytes == 64 * 4 * 40 * 4000 * 2
    assert steps[1].flops == steps[0].flops


def test_a_backward_launches_as_often_as_its_kind_of_code_does() -> None:
    fused, eager = (ModelCounts(shape(), eager=eager) for eager in (False, True))
    prompts = [Prompt(900, ((2, 20, 16),))]
    forward, backward = eager.vision(prompts), eager.vision_backward(prompts)
    assert backward.kernels == EAGER.backward * forward.kernels
    assert fused.vision_backward(prompts).kernels == 2 * fused.vision(prompts).kernels
    layers = shape().text.num_layers
    extra = eager.response([GroupLoad(prompts[0], (5, 5))], head=False).kernels - eager.decoder(8, 1).kernels
    assert extra == layers * (EAGER.on_prefix - EAGER.attention)


@pytest.mark.parametrize("experts", [Experts(128, 8), Experts(8, 2), Experts(4, 4)])
@pytest.mark.parametrize("plan", [Parallel(tensor=4), Parallel(data=4, expert=4), Parallel(pipeline=2, data=2)])
def test_experts_that_rows_do_not_share_are_in_the_bound(experts: Experts, plan: Parallel) -> None:
    """A single row reads the weights of its own experts, 32 rows those of many more."""
    text = dataclasses.replace(shape().text, intermediate_size=1024, experts=experts)
    counts = ModelCounts(dataclasses.replace(shape(), text=text), 2, experts)
    side = Side(counts, hardware("h800"), plan)
    loads = (GroupLoad(Prompt(500), (300,) * 8),) * 8
    generation = stages(StepCost(side, side, Algorithm(), loads))[0]
    assert generation.lower_s <= generation.estimate_s <= generation.upper_s


@given(groups=st.integers(1, 9), engines=st.sampled_from([1, 2, 4, 8]), places=st.none() | st.integers(1, 40))
def test_groups_that_are_alike_stay_within_the_bound_on_any_number_of_engines(
    groups: int, engines: int, places: int | None
) -> None:
    """Also where there are fewer groups than engines: a group stays on one."""
    counts, device = ModelCounts(shape()), hardware("h800")
    train, rollout = Side(counts, device, Parallel(tensor=8)), Side(counts, device, Parallel(data=engines))
    loads = (GroupLoad(Prompt(5000), (900, 900, 900, 900)),) * groups
    generation = stages(StepCost(train, rollout, Algorithm(), loads, max_rows=places))[0]
    assert generation.lower_s <= generation.estimate_s * (1 + 1e-6)
    assert generation.estimate_s <= generation.upper_s * (1 + 1e-6)
