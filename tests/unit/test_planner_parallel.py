"""Volumes of every axis by hand, and which link carries them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rollplex.errors import ConfigError
from rollplex.models.shapes import Experts, ModelShape, shape_from_hf
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import HARDWARE, hardware, hardware_facts, hardware_from_facts
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.parallel import Parallel, gradient_traffic, sweep_traffic
from rollplex.planner.passes import Algorithm, passes
from rollplex.schedule.spec import Phase

TOKENS, HIDDEN, LAYERS = 1000, 512, 6


def shape() -> ModelShape:
    text = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000}  # fmt: skip
    return shape_from_hf({"model_type": "qwen3_vl", "text_config": text}, "test")


COUNTS = ModelCounts(shape(), 2)
MOE = ModelCounts(shape(), 2, Experts(16, 4))


def _volume(plan: Parallel, counts: ModelCounts = COUNTS) -> dict[str, float]:
    return {part.axis: part.nbytes for part in sweep_traffic(counts, plan, TOKENS)}


def test_one_device_sends_nothing() -> None:
    assert sweep_traffic(COUNTS, Parallel(), TOKENS) == gradient_traffic(COUNTS, Parallel()) == ()


def test_tensor_parallelism_reduces_twice_a_layer() -> None:
    assert _volume(Parallel(tensor=4)) == {"tensor": LAYERS * 2 * 2 * 3 / 4 * TOKENS * HIDDEN * 2}


def test_a_context_ring_passes_keys_and_values_on() -> None:
    # 250 tokens of K and V (2 heads of 64, 2 bytes) to the neighbour, three times a layer.
    assert _volume(Parallel(context=4)) == {"context": LAYERS * 3 * 250 * 2 * 2 * 64 * 2}


def test_a_ring_passes_the_prompt_to_its_responses_and_gradients_back() -> None:
    group, plan = GroupLoad(Prompt(4000), (101,) * 8), Parallel(context=4)
    algorithm = Algorithm(micro_batch_tokens=400)  # 800 tokens fed: two micro-batches, each with the whole prompt
    token = 2 * 2 * 64 * 2
    sent = {}
    for phase in (Phase.REF_PREFIX, Phase.PREFIX_BACKWARD, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE):
        (one,) = passes(phase, group, COUNTS, algorithm)
        (part,) = sweep_traffic(COUNTS, plan, one.tokens, one.sweeps, ring_tokens=one.ring_tokens)
        sent[phase] = part.nbytes / (LAYERS * 3 / 4 * token)
    attended = 800 + 2 * 4000
    assert sent[Phase.REF_PREFIX] == 4000
    assert sent[Phase.PREFIX_BACKWARD] == 3 * 4000  # forward once more, then keys and values with their gradients
    assert (sent[Phase.REF_RESPONSE], sent[Phase.ACTOR_RESPONSE]) == (attended, 3 * attended)


def test_experts_send_each_token_to_its_experts_and_back() -> None:
    # Four copies of each token out and back, three quarters of them to other devices.
    assert _volume(Parallel(data=4, expert=4), MOE) == {"expert": LAYERS * 2 * TOKENS * 4 * HIDDEN * 2 * 3 / 4}
    assert _volume(Parallel(data=4), MOE) == {}


def test_a_pipeline_passes_hidden_states_on() -> None:
    assert _volume(Parallel(pipeline=3)) == {"pipeline": TOKENS * HIDDEN * 2}


def test_a_backward_is_one_more_sweep() -> None:
    one, two = (sweep_traffic(COUNTS, Parallel(tensor=2), TOKENS, sweeps)[0] for sweeps in (1.0, 2.0))
    assert (two.nbytes, two.hops) == (2 * one.nbytes, 2 * one.hops)


def test_gradients_are_reduced_and_weights_gathered_once_a_step() -> None:
    (part,) = gradient_traffic(COUNTS, Parallel(data=8))
    assert part.nbytes == COUNTS.parameters * (4 + 2) * 7 / 8
    (reduced,) = gradient_traffic(COUNTS, Parallel(data=8), sharded=False)
    assert reduced.nbytes == COUNTS.parameters * (4 + 4) * 7 / 8


def test_experts_are_summed_among_those_that_hold_the_same() -> None:
    """Sixteen experts on four of eight devices each: two copies of an expert, eight of all else."""
    plan, outside = Parallel(data=8, expert=4), MOE.parameters - MOE.expert_parameters
    (part,) = gradient_traffic(MOE, plan)
    assert part.nbytes == pytest.approx(6 * (outside * 7 / 8 + MOE.expert_parameters / 4 / 2))
    assert plan.optimized(MOE, sharded=True) == pytest.approx(outside / 8 + MOE.expert_parameters / 8)
    assert plan.optimized(MOE, sharded=False) == pytest.approx(outside + MOE.expert_parameters / 4)
    alone = Parallel(data=4, expert=4)
    assert alone.optimized(MOE, sharded=True) == pytest.approx(outside / 4 + MOE.expert_parameters / 4)


def test_context_ranks_sum_gradients_over_the_link_that_they_span() -> None:
    plan, device = Parallel(tensor=8, context=4), hardware("h800")
    (part,) = gradient_traffic(COUNTS, Parallel(tensor=2, context=4))
    assert part.nbytes > 0
    assert plan.span("data") == 25 and device.link(plan.span("data")) == device.inter


def test_parameters_of_a_device() -> None:
    whole = Parallel().parameters(COUNTS)
    assert whole == (COUNTS.text_parameters, COUNTS.vision_parameters)
    # Norms, and here a KV head per two ranks, are held more than once.
    assert 1 <= 4 * Parallel(tensor=4).parameters(COUNTS)[0] / whole[0] < 1.15
    assert Parallel(pipeline=2).parameters(COUNTS)[0] == pytest.approx(whole[0] / 2, abs=1)
    assert Parallel().parameters(MOE)[0] == MOE.text_parameters
    spread, whole_moe = Parallel(data=4, expert=4).parameters(MOE)[0], Parallel().parameters(MOE)[0]
    assert whole_moe - spread == MOE.expert_parameters * 3 // 4


def test_ranks_of_an_axis_decide_the_link() -> None:
    plan, device = Parallel(tensor=4, data=8), hardware("h800")
    assert str(plan) == "TP4 PP1 DP8" and str(Parallel(2, context=4, expert=4)) == "TP2 PP1 DP1 CP4 EP4"
    assert (plan.span("tensor"), plan.span("data")) == (4, 29)
    assert device.link(plan.span("tensor")) == device.intra
    assert device.link(plan.span("data")) == device.inter
    assert hardware("h800").intra.bandwidth == 200e9  # 400 GB/s counts both ways


def test_kv_heads_are_never_cut() -> None:
    assert [Parallel(tensor=t).kv_share(COUNTS) for t in (1, 2, 4, 8)] == [1, 0.5, 0.5, 0.5]


def test_every_record_survives_json() -> None:
    for device in HARDWARE.values():
        assert hardware_from_facts(json.loads(json.dumps(hardware_facts(device)))) == device
        assert device.source and device.flops > 1e13 and device.intra.bandwidth >= device.inter.bandwidth


@pytest.mark.parametrize(
    "change",
    [
        {"flops": "many"},
        {"flops": 0},
        {"speed": 3},
        {"efficiency": {"matmul": -1}},
        {"efficiency": {"matmul": float("inf")}},
        {"efficiency": {"kernel_s": float("nan")}},
        {"intra": {"bandwidth": 0, "latency_s": 0}},
        {"inter": {"bandwidth": "fast", "latency_s": 0}},
        {"inter": {"bandwidth": 1e9, "latency_s": float("nan")}},
        {"inter": {"bandwidth": 1e9}},
    ],
)
def test_a_spoilt_calibration_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="calibration|efficiency"):
        hardware_from_facts({**hardware_facts(hardware("h100")), **change})


def test_efficiencies_replace_the_assumed_ones() -> None:
    slow = hardware("h100").reaching(matmul=0.1)
    assert slow.matmul_rate == pytest.approx(98.9e12)
    assert dataclasses.replace(slow, efficiency=hardware("h100").efficiency) == hardware("h100")
