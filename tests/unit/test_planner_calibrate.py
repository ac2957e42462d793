"""Fitted efficiencies: known ones found again from spans that they made, and what cannot be fitted refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from rollplex.config import BuildConfig
from rollplex.errors import ConfigError
from rollplex.models.shapes import shape_from_build, shape_from_hf
from rollplex.planner.calibrate import FREE, TracedStep, fit, measured_spans, on, residuals
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Efficiency, Hardware, cpu, hardware, hardware_from_facts
from rollplex.planner.load import GroupLoad, Prompt, video_prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.passes import Algorithm
from rollplex.schedule.spec import Phase, StepSpec, Task
from rollplex.trace import Span

SHAPE = shape_from_hf({"model_type": "qwen3_vl"}, "defaults")
TRUE = hardware("a100-80g").reaching(matmul=0.5, attention=0.2, memory=0.7, kernel_s=4e-5, decode_step_s=3e-3)
PHASES = (Phase.PREFILL, Phase.DECODE, Phase.REF_PREFIX, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE)


def steps(device: Hardware) -> dict[int, StepCost]:
    """Prompts short and long, batches small and large: what each efficiency needs to be seen."""
    side = Side(ModelCounts(SHAPE), device, Parallel())
    loads = {
        1: [GroupLoad(Prompt(64), (20,) * 2)] * 2,
        2: [GroupLoad(Prompt(30000), (50,) * 4)] * 2,
        3: [GroupLoad(Prompt(2000), (400,) * 64)] * 4,
    }
    algorithm = Algorithm(prefill_is_actor_prefix=True)
    return {step: StepCost(side, side, algorithm, tuple(groups)) for step, groups in loads.items()}


FIRST_ID = 40


def traced(device: Hardware) -> dict[int, TracedStep]:
    """As a run would have it: rollout ids go on from step to step."""
    return {
        step: TracedStep(cost, tuple(FIRST_ID + g for g in range(len(cost.groups))))
        for step, cost in steps(device).items()
    }


def spans(noise: float = 0.0) -> list[Span]:
    rng, found = np.random.default_rng(0), []
    for step, cost in steps(TRUE).items():
        for group in range(len(cost.groups)):
            for phase in PHASES:
                seconds = cost.task(Task(phase, group)).total * float(np.exp(noise * rng.standard_normal()))
                found.append(Span(phase, "main", 0.0, seconds, step, FIRST_ID + group))
        spec = StepSpec(len(cost.groups), reference=True, prefill_is_actor_prefix=True)
        update = (Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD, Phase.OPTIMIZER)
        seconds = sum(cost.task(task).total for task in spec.tasks if task.phase in update)
        found.append(Span("update", "main", 0.0, seconds, step))
    return found


def test_known_efficiencies_are_found_again() -> None:
    start = hardware("a100-80g")
    found = fit(measured_spans(spans(), traced(start)), start)
    for field in dataclasses.fields(Efficiency):
        wanted = getattr(TRUE.efficiency, field.name) if field.name != "link" else start.efficiency.link
        assert getattr(found.hardware.efficiency, field.name) == pytest.approx(wanted, rel=0.05), field.name
    assert set(found.residuals) == {*PHASES, "update"}
    assert all(abs(left.relative) < 0.01 and left.typical_error < 0.01 for left in found.residuals.values())


@pytest.mark.parametrize("reached", [0.5, 1.6])
def test_decoding_on_fewer_threads_has_a_rate_of_its_own_and_never_a_higher_one(reached: float) -> None:
    start = hardware("a100-80g")
    own = steps(TRUE.reaching(decode=reached))
    found_spans = []
    for span in spans():
        if span.name == Phase.DECODE and span.group is not None:
            seconds = own[span.step].task(Task(Phase.DECODE, span.group - FIRST_ID)).total
            span = dataclasses.replace(span, end_s=seconds)
        found_spans.append(span)
    found = fit(measured_spans(found_spans, traced(start)), start, (*FREE, "decode"))
    assert found.hardware.efficiency.decode == pytest.approx(min(reached, 1.0), rel=0.05)
    if reached < 1:
        assert found.hardware.efficiency.matmul == pytest.approx(TRUE.efficiency.matmul, rel=0.05)
        assert abs(found.residuals[Phase.DECODE].relative) < 0.02


def test_a_cpus_decode_steps_launch_for_themselves() -> None:
    """Passes that wait for every kernel say nothing of decoding, whose constant is one number."""
    true = cpu(2, 16e9).reaching(kernel_s=5e-2, decode_step_s=5.0)
    found_spans = [
        dataclasses.replace(s, end_s=on(steps(true)[s.step], true).task(Task(Phase(s.name), s.group - FIRST_ID)).total)
        for s in spans()
        if s.group is not None
    ]
    start = cpu(2, 16e9).reaching(kernel_s=1e-2, decode_step_s=1.0)  # of the order that a model of this size takes
    found = fit(measured_spans(found_spans, traced(start)), start)
    assert found.hardware.efficiency.decode_step_s == pytest.approx(5.0, rel=0.05)
    assert abs(found.residuals[Phase.DECODE].relative) < 0.01
    shared = found.hardware.reaching(decode_kernels=1.0)
    assert on(steps(shared)[1], shared).task(Task(Phase.DECODE, 0)).launches > 0
    assert on(steps(true)[1], true).task(Task(Phase.DECODE, 0)).launches == 0


def test_noise_does_not_carry_over_to_another_setting() -> None:
    start = hardware("a100-80g")
    found = fit(measured_spans(spans(noise=0.1), traced(start)), start).hardware
    unseen = [GroupLoad(Prompt(9000), (120,) * 8)] * 3
    for phase in PHASES:
        truth, guess = (
            dataclasses.replace(on(steps(start)[1], device), groups=tuple(unseen)).task(Task(phase, 1)).total
            for device in (TRUE, found)
        )
        assert guess == pytest.approx(truth, rel=0.1), phase


def test_the_residual_says_which_phase_is_not_met() -> None:
    odd = [dataclasses.replace(s, end_s=3 * s.end_s) if s.name == Phase.REF_PREFIX else s for s in spans()]
    found = residuals(measured_spans(odd, traced(TRUE)), TRUE)
    assert found[Phase.REF_PREFIX].relative == pytest.approx(-2 / 3)
    assert found[Phase.DECODE].relative == pytest.approx(0)


def test_what_is_no_task_of_the_steps_is_left_out() -> None:
    cost = traced(TRUE)
    strange = [
        Span("prompts", "main", 0, 1, 1),
        Span("reward", "reward", 0, 1, 1, FIRST_ID),
        Span("decode", "decode", 0, 1, 1, 0),
        Span("decode", "decode", 0, 1, 77, FIRST_ID),
        Span("decode", "decode", 0, 1e-6, 1, FIRST_ID),
        Span("decode", "decode", 0, 1, 1, FIRST_ID, source="simulated"),
        Span("publish", "main", 0, 1, 1),  # within one process nothing is moved: the model has no time for it
    ]
    assert measured_spans(strange, cost) == []


def test_a_span_of_a_unit_is_all_its_prompts() -> None:
    cost = steps(TRUE)[3]
    step = TracedStep(cost, (40, 41, 42, 43), units=((40,), (42, 41, 43)))
    labels = {Phase.REF_PREFIX: (40, 42), Phase.DECODE: (40, 41, 42, 43)}
    found = measured_spans([Span(p, "main", 0, 1, 3, label) for p, ids in labels.items() for label in ids], {3: step})
    alone, three, *decoded = (m.predict(TRUE) for m in found)
    assert three == pytest.approx(3 * alone)
    assert decoded == [cost.task(Task(Phase.DECODE, g)).total for g in range(4)]
    with pytest.raises(ValueError, match="99"):
        TracedStep(cost, (40, 41, 42, 43), units=((99,),))


def test_a_calibration_is_a_file_of_its_own() -> None:
    start = hardware("a100-80g")
    facts = json.loads(json.dumps(fit(measured_spans(spans(), traced(start)), start).facts()))
    assert facts["source"] == "measured"
    assert hardware_from_facts(facts["hardware"]).efficiency.matmul == pytest.approx(0.5, rel=0.05)


def test_what_cannot_be_fitted_is_refused() -> None:
    start = hardware("a100-80g")
    known = measured_spans(spans(), traced(start))
    with pytest.raises(ConfigError, match="no span"):
        fit([], start)
    with pytest.raises(ConfigError, match="speed"):
        fit(known, start, free=("speed",))
    with pytest.raises(ConfigError, match="kernel_s starts at 0"):
        fit(known, start.reaching(kernel_s=0.0))


def test_a_cpu_starts_from_nominal_peaks_and_grows_with_its_cores() -> None:
    one, two = cpu(1, 8e9), cpu(2, 8e9)
    assert (two.matmul_rate, two.byte_rate) == (2 * one.matmul_rate, 2 * one.byte_rate)
    found = fit(measured_spans(spans(), traced(one)), one, (*FREE, "decode")).hardware
    assert found.matmul_rate == pytest.approx(TRUE.matmul_rate, rel=0.05)  # whatever the nominal peak


def test_attention_is_never_fitted_faster_than_products() -> None:
    """Short prompts say nothing about attention: noise must not make it what no device can do."""
    start = hardware("a100-80g").reaching(matmul=0.1)
    short = [m for m in measured_spans(spans(), {1: traced(start)[1]}) if m.phase == "update"]
    found = fit(short, start).hardware.efficiency
    assert start.efficiency.attention > start.efficiency.matmul
    assert found.attention <= found.matmul


# Settings of benchmarks/prediction.py: pictures of how many tokens, tokens of a response, prompts of a pass.
SETTINGS = {"S1": (4, 64, 64, 1), "S2": (1, 16, 32, 4), "S3": (16, 64, 64, 1), "S4": (4, 64, 256, 1)}
SMALL = shape_from_build(
    BuildConfig(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, vision_hidden_size=32), 512
)
EACH = (*PHASES, Phase.PREFIX_BACKWARD)


def setting(name: str, device: Hardware) -> StepCost:
    """A step of four prompts with eight responses each, on a CPU's cores."""
    pictures, visual, tokens, pack = SETTINGS[name]
    side = Side(ModelCounts(SMALL, 4, eager=True), device, Parallel())
    prompt = video_prompt(pictures * visual + 30, pictures * visual, SMALL.vision, tokens_per_frame=visual)
    algorithm = Algorithm(activations="graph", prefill_is_actor_prefix=True, pack_groups=pack)
    return StepCost(side, side, algorithm, (GroupLoad(prompt, (tokens,) * 8),) * 4)


def step_seconds(cost: StepCost) -> float:
    """One phase after another; all groups decode at once."""
    passes = (4 * cost.task(Task(phase, 0)).total for phase in EACH if phase is not Phase.DECODE)
    return sum(passes) + cost.task(Task(Phase.DECODE, 0)).total + cost.optimizer.total


@pytest.mark.parametrize("source", SETTINGS)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_one_setting_is_enough_to_predict_the_others(source: str, noise: float) -> None:
    """Decode steps of one length do not tell their constant from their rates, nor short prompts attention from
    products: neither may spoil the steps of another setting."""
    start = cpu(2, 16e9)
    true = start.reaching(matmul=0.9, attention=0.8, memory=0.5, kernel_s=8e-5, decode_step_s=2e-3, decode=0.6)
    rng, cost, found_spans = np.random.default_rng(1), setting(source, true), []
    for group in range(4):
        tasks = [Task(phase, group) for phase in EACH]
        for task in tasks:
            seconds = cost.task(task).total * float(np.exp(noise * rng.standard_normal()))
            found_spans.append(Span(task.phase, "main", 0.0, seconds, 1, group))
    found_spans.append(Span(Phase.OPTIMIZER, "main", 0.0, cost.optimizer.total, 1))
    step = TracedStep(setting(source, start), (0, 1, 2, 3))
    found = fit(measured_spans(found_spans, {1: step}), start, (*FREE, "decode")).hardware
    for target in SETTINGS:
        wanted = step_seconds(setting(target, true))
        assert step_seconds(setting(target, found)) == pytest.approx(wanted, rel=0.08 if noise else 0.05), target


def test_many_spans_of_a_phase_weigh_no_more_than_a_few() -> None:
    """A phase that the model misses does not outvote the others by being seen often."""
    start = hardware("a100-80g")
    odd = [m for m in measured_spans(spans(), traced(start)) if m.phase != Phase.REF_PREFIX]
    missed = [
        dataclasses.replace(m, seconds=2 * m.seconds)
        for m in measured_spans(spans(), traced(start))
        if m.phase == Phase.REF_PREFIX
    ]
    once, often = (fit([*odd, *missed * times], start).hardware for times in (1, 20))
    assert often.efficiency.matmul == pytest.approx(once.efficiency.matmul, rel=1e-3)
