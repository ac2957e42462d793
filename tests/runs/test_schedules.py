"""The schedule changes when things run, never what comes out of them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex.config import Config
from rollplex.errors import ConfigError, DeadlineError, RewardError
from rollplex.models.precision import full_float64
from rollplex.models.prefix import PrefixPack, compute_prefix
from rollplex.rollout.scripted_engine import ScriptedEngines
from rollplex.runtime.device import device_of, green_context
from rollplex.runtime.executor import SWITCH_S
from rollplex.runtime.learner import Learner
from rollplex.runtime.trainer import Trainer, train
from rollplex.schedule.step import Lane
from rollplex.tasks.rewards import TrainerState
from rollplex.train.prefix_book import PrefixBook
from rollplex.types import FinishReason, Response

STEPS = 5
OPEN = {"overlap": "on", "unit_tokens": 64, "decode_threads": 1}


def varied_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


CALLS: list[int] = []  # steps of the calls so far


def late_failure(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Raises in the second step, for the last group to end, while AWAY is set."""
    CALLS.append(trainer_state.global_step)
    if CALLS[-4:] == [1] * 4 and os.environ.get("AWAY"):
        raise RuntimeError("the judge is away")
    return varied_reward(completion_ids)


def _config(folder: Path, schedule: dict[str, Any], /, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(folder), "num_threads": 2, "log_completions_steps": 0},
        "model": {"build": {}},
        "data": {"task": "mixed", "image_size": 56},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12},
        "algorithm": {"beta": 0.04},
        "rewards": {"reward_funcs": [f"{__file__}:varied_reward"]},
        "train": {"max_steps": STEPS, "learning_rate": 1e-3},
        "schedule": schedule,
    }
    for name, options in sections.items():
        tree[name] = {**tree.get(name, {}), **options}
    return Config.model_validate(json.loads(json.dumps(tree)))


def _weights_after(config: Config) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[list[str]]]:
    """After STEPS steps; of each, its metrics and the passes that ran beside decoding."""
    trainer = Trainer(config)
    try:
        steps = [trainer.run_step() for _ in range(STEPS)]
        weights = {k: v.detach().clone() for k, v in trainer.session.loaded.model.named_parameters()}
    finally:
        trainer.close()
    beside = [[span.name for span in outcome.spans if span.lane == Lane.WINDOW] for _, outcome in steps]
    return weights, [dict(report.metrics) for report, _ in steps], beside


def slow_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """varied_reward, late: a step's passes begin before the last group's rewards are there."""
    time.sleep(0.05)
    return varied_reward(completion_ids)


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "reference": {},
    "no reference": {"algorithm": {"beta": 0.0}},
    "several steps": {"algorithm": {"steps_per_generation": 2, "num_iterations": 2}},
    "staggered, late rewards": {
        "algorithm": {"steps_per_generation": 2},
        "rollout": {"max_decode_rows": 6},
        "rewards": {"reward_funcs": [f"{__file__}:slow_reward"]},
    },
    "lora": {"model": {"lora": {"r": 4}}},
    "frozen vision": {"model": {"freeze_vision": True}},
    "checkpointed": {"train": {"prefix_activations": "checkpoint"}},
    "whole sequences": {"train": {"share_prefix": False}},
    "per response": {"train": {"share_prefix": False, "unshared_prefix": "per_response"}},
    "resampled": {"algorithm": {"dynamic_sampling": "resample"}},
    "late rewards": {"algorithm": {"beta": 0.0}, "rewards": {"reward_funcs": [f"{__file__}:slow_reward"]}},
    "qwen3_vl": {"model": {"build": {"family": "qwen3_vl"}}},
    # Kernels have other bits on other numbers of threads where a product has so few rows (models/steady.py).
    "six prompts a pass": {"rollout": {"prompts_per_step": 6}, "schedule": {"unit_tokens": 512}},
    "nine visual tokens": {"data": {"task": "counting", "image_size": 84}, "schedule": {"unit_tokens": 1}},
    "in chunks": {"schedule": {"chunk_tokens": 33}},
    "in chunks, qwen3_vl, recomputed": {
        "model": {"build": {"family": "qwen3_vl"}},
        "schedule": {"chunk_tokens": 32},
        "train": {"prefix_activations": "recompute"},
    },
}


def _untimed(metrics: dict[str, float]) -> dict[str, float]:
    timed = ("timing_s/", "step_time", "overlap/")
    kept = {name: value for name, value in metrics.items() if not name.startswith(timed)}
    return {name.replace("slow_reward", "varied_reward"): value for name, value in kept.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_rollplex_has_the_bits_of_serial(variant: str, tmp_path: Path) -> None:
    sections = VARIANTS[variant]
    closed = {**OPEN, "name": "serial", "overlap": "off"}
    prompt = {**sections, "rewards": {}}  # the same rewards, at once
    wanted, before, _ = _weights_after(_config(tmp_path, closed, **prompt))
    found, after, beside = _weights_after(_config(tmp_path, {**OPEN, "name": "rollplex"}, **sections))
    assert [name for name in wanted if not wanted[name].equal(found[name])] == []
    assert [_untimed(metrics) for metrics in before] == [_untimed(metrics) for metrics in after]
    moved = variant not in {"no reference", "whole sequences", "resampled", "late rewards"}
    assert [bool(step) for step in beside] == [moved] * STEPS
    assert all(m["overlap/hidden_s"] == 0 for m in before)


def test_a_chunk_that_exceeds_every_pass_has_the_bits_of_whole_passes(tmp_path: Path) -> None:
    """And smaller ones are really cut: their sums have another order."""
    weights = {
        chunk_tokens: _weights_after(_config(tmp_path, {**OPEN, "name": "rollplex", "chunk_tokens": chunk_tokens}))[0]
        for chunk_tokens in (None, 4096, 33)
    }
    whole = weights[None]
    assert all(tensor.equal(weights[4096][name]) for name, tensor in whole.items())
    assert not all(tensor.equal(weights[33][name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("variant", "loss"),
    [*(("reference", loss) for loss in ("dapo", "dr_grpo", "bnpo", "grpo")), ("lora", "dapo")]
    + [("whole sequences", "dapo"), ("per response", "dapo")],
)
def test_stream_equals_serial_but_for_the_order_of_sums(variant: str, loss: str, tmp_path: Path) -> None:
    sections = {**VARIANTS[variant]}
    sections["model"] = {**sections.get("model", {}), "dtype": "float64"}
    sections["algorithm"] = {**sections.get("algorithm", {}), "loss_type": loss}
    sections["rollout"] = {"max_decode_rows": 6}  # groups end one after another
    with full_float64():  # else a last bit of a sum flips a rounding to fp32 inside the model
        closed = {**OPEN, "name": "serial", "overlap": "off"}
        wanted, before, _ = _weights_after(_config(tmp_path, closed, **sections))
        found, after, beside = _weights_after(_config(tmp_path, {**OPEN, "name": "stream"}, **sections))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    apart, size = (
        torch.cat([tensor.flatten() for tensor in tensors]).norm()
        for tensors in ([found[name] - wanted[name] for name in wanted], list(wanted.values()))
    )
    assert apart / size <= 1e-12
    assert any(beside)
    for a, b in zip(before, after, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9, abs=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-9)


@pytest.mark.parametrize("schedule", ["serial", "rollplex", "stream"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_prefix_gives_its_memory_back(
    variant: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever computed it, by the end of the step: a graph that waits for the garbage collector is a leak on a GPU."""
    if schedule == "stream" and variant in {"several steps", "staggered, late rewards", "resampled"}:
        pytest.skip("refused by stream")
    packs: list[PrefixPack] = []

    def recorded(*args: Any) -> PrefixPack:
        packs.append(compute_prefix(*args))
        return packs[-1]

    monkeypatch.setattr("rollplex.runtime.step_tasks.compute_prefix", recorded)
    options = {**OPEN, "name": schedule, "overlap": "off" if schedule == "serial" else "on"}
    trainer = Trainer(_config(tmp_path, options, **VARIANTS[variant]))
    try:
        trainer.run_step()
    finally:
        trainer.close()
    assert packs and [pack.activations for pack in packs if not pack.consumed] == []


@pytest.mark.parametrize("loss", ["dapo", "cispo", "bnpo", "grpo"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_of_the_learner_is_that_of_the_updater(loss: str, steps: int, tmp_path: Path) -> None:
    """Tasks and units add up to `Updater.update`, which the numerics hold against the textbook: all normalisations."""
    algorithm = {"loss_type": loss, "steps_per_generation": steps, "num_iterations": steps, "epsilon_high": 5.0}
    options: dict[str, dict[str, Any]] = {
        "model": {"dtype": "float64"},
        "algorithm": algorithm,
        "rollout": {"max_decode_rows": 6, "temperature": 1.5},
        "rewards": {"reward_funcs": [f"{__file__}:slow_reward"]},
    }
    config = _config(tmp_path, {**OPEN, "name": "rollplex"}, **options)
    with full_float64():
        found, wanted = Trainer(config), Trainer(config)
        try:
            report, outcome = found.run_step()
            updater = wanted.learner.updater
            frozen = updater.frozen_logps([scored.group for scored in outcome.groups], _book(wanted, outcome.groups))
            metrics = updater.update(outcome.groups, _book(wanted, outcome.groups), frozen)
        finally:
            found.close()
            wanted.close()
    for name in ("loss", "policy_loss", "grad_norm", "kl"):
        assert report.metrics[name] == pytest.approx(metrics[name], rel=1e-9, abs=1e-13), name
    weights = dict(found.session.loaded.model.named_parameters())
    for name, tensor in wanted.session.loaded.model.named_parameters():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def _book(trainer: Trainer, groups: Any) -> PrefixBook:
    book = PrefixBook(trainer.session.policy, 10_000)
    half = len(groups) // trainer.config.algorithm.steps_per_generation  # a pack never holds prompts of two steps
    for part in (groups[:half], groups[half:]):
        if part:
            book.compute({scored.group.rollout_id: scored.group.spec for scored in part}, "graph")
    return book


PLACES = [(rollout_id, index) for rollout_id in range(4) for index in range(4)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stage")
    schedule = {**OPEN, "name": "serial", "overlap": "off"}
    return Trainer(_config(folder, schedule, model={"build": {}, "dtype": "float64"}))


def _gradient(trainer: Trainer, config: Config, order: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Gradient of one step whose responses are scripted and end in `order`; weights stay as they are."""
    found: dict[str, torch.Tensor] = {}
    optimizer = trainer.optimizer

    def record() -> Any:
        found.update({n: m.grad.clone() for n, m in optimizer.masters.items() if m.grad is not None})
        optimizer.drop_gradients()
        return type("Step", (), {"grad_norm": 1.0, "learning_rate": 0.0})()

    responses = {
        i: tuple(
            Response(
                j, tuple((11 * i + 5 * j + t) % 200 + 20 for t in range(1 + (i + 2 * j) % 5)), (), FinishReason.STOP
            )
            for j in range(4)
        )
        for i in range(4)
    }
    responses = {
        i: tuple(Response(r.index, r.token_ids, (-1.0,) * len(r.token_ids), r.finish) for r in group)
        for i, group in responses.items()
    }
    torch.set_num_threads(trainer.config.run.num_threads)  # of the whole process: another test may have changed it
    learner = Learner(
        trainer.session.policy,
        optimizer,
        trainer.reference,
        trainer.collector,
        config,
        stop_token_ids=trainer.session.stop_token_ids,
        engines=ScriptedEngines(responses, order),
    )
    slots = [slot for slot in _slots(trainer)]
    step, optimizer.step = optimizer.step, record  # type: ignore[method-assign]
    try:
        learner.step(lambda _count: slots, TrainerState(0, 1))
    finally:
        optimizer.step = step  # type: ignore[method-assign]
        learner.close()
    return found


def _slots(trainer: Trainer) -> list[Any]:
    if not hasattr(trainer, "scripted_slots"):
        trainer.scripted_slots = trainer.feed.take(4)  # type: ignore[attr-defined]
    return trainer.scripted_slots  # type: ignore[attr-defined,no-any-return]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(PLACES), open_window=st.booleans())
def test_any_order_of_completion_gives_the_same_gradient(stage: Trainer, order: Any, open_window: bool) -> None:
    wanted = _gradient(stage, stage.config, [])
    streaming = stage.config.model_copy(
        update={
            "schedule": stage.config.schedule.model_copy(
                update={"name": "stream", "overlap": "on" if open_window else "off"}
            )
        }
    )
    found = _gradient(stage, streaming, list(order))
    assert found.keys() == wanted.keys()
    norm = sum(float((t**2).sum()) for t in wanted.values()) ** 0.5
    wrong = sum(float(((found[n] - wanted[n]) ** 2).sum()) for n in wanted) ** 0.5
    assert 0 < norm and wrong <= 1e-12 * norm


@pytest.mark.parametrize("name", ["serial", "rollplex", "stream"])
def test_a_reward_that_raises_inside_a_window_loses_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step leaves no half-applied gradient, and a resume ends as a run that never failed."""
    schedule = {**OPEN, "name": name, "overlap": "off" if name == "serial" else "on"}
    options: dict[str, Any] = {"model": {"build": {}, "dtype": "float64"}, "train": {"max_steps": 3}}
    monkeypatch.setenv("AWAY", "1")
    failing = {"reward_funcs": [f"{__file__}:late_failure"]}
    with pytest.raises(RewardError, match="the judge is away"):
        train(_config(tmp_path / "run", schedule, rewards=failing, **options))
    monkeypatch.delenv("AWAY")
    train(_config(tmp_path / "run", schedule, rewards=failing, run={"resume_from_checkpoint": "auto"}, **options))
    train(_config(tmp_path / "whole", schedule, rewards=failing, **options))
    whole, again = (_final(tmp_path / folder) for folder in ("whole", "run"))
    for key, tensor in whole.items():
        torch.testing.assert_close(again[key], tensor, rtol=1e-10, atol=1e-12, msg=key)


def _final(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "checkpoint-3" / "model.safetensors")


def test_a_pass_that_hangs_in_the_window_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from rollplex.runtime.step_tasks import StepTasks

    release, ended = threading.Event(), list[int]()

    def hang(_self: StepTasks, unit: int) -> None:
        release.wait(120)
        ended.append(unit)

    monkeypatch.setattr(StepTasks, "_ref_prefix", hang)
    monkeypatch.setattr("rollplex.runtime.executor.LAST_WAIT_S", 0.2)
    trainer = Trainer(_config(tmp_path, {**OPEN, "name": "rollplex", "pass_timeout_s": 0.2}))
    try:
        with pytest.raises(
            DeadlineError, match=r"ref_prefix of group 0.* did not end within schedule.pass_timeout_s=0.2 s"
        ):
            trainer.run_step()
    finally:
        trainer.close()
        waited = list(ended)
        release.set()
    assert waited == []  # neither the error nor the end of the run waits for the pass


@pytest.mark.skipif(device_of("auto").type == "cuda", reason="there is a GPU")
def test_a_part_of_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule.window_sms=8 cannot be had: .*leave the option out"):
        green_context(torch.device("cuda"), 8)


@pytest.mark.parametrize(
    ("schedule", "train", "message"),
    [
        ({"name": "serial", "overlap": "on"}, {}, "does nothing with schedule.name serial"),
        ({}, {"unshared_prefix": "per_response"}, "does nothing with train.share_prefix on"),
        ({"decode_threads": 2, "window_threads": 1}, {}, "together more than the 2 threads of this run"),
        ({"window_threads": 2}, {}, "together more than the 2 threads of this run"),
        ({"window_threads": 1, "overlap": "off"}, {}, "schedule.window_threads 1 .*: nothing runs beside decoding"),
        ({"window_sms": 8, "overlap": "off"}, {}, "schedule.window_sms 8 .*: nothing runs beside decoding"),
        ({"window_sms": 8}, {}, "schedule.window_sms does nothing on a CPU"),
        ({"name": "strem"}, {}, "schedule.name 'strem' is unknown; needed one of serial, rollplex, stream"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(
    schedule: dict[str, Any], train: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        Trainer(_config(tmp_path, schedule, train=train))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"scale_rewards": "batch"}, "algorithm.scale_rewards=batch"),
        ({"num_iterations": 2}, "set both to 1"),
        ({"dynamic_sampling": "resample"}, "dynamic_sampling=resample"),
    ],
)
def test_stream_refuses_at_the_start_what_would_not_be_exact(
    algorithm: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(_config(tmp_path, {"name": "stream"}, algorithm=algorithm))


def test_one_thread_has_no_window(tmp_path: Path) -> None:
    one = {"output_dir": str(tmp_path), "num_threads": 1}
    with pytest.raises(
        ConfigError, match=r"overlap is on, but decoding takes every CPU thread of this run; raise run.num"
    ):
        Trainer(_config(tmp_path, {"overlap": "on"}, run=one))
    trainer = Trainer(_config(tmp_path, {"overlap": "auto"}, run=one))
    try:
        assert trainer.learner.overlap.reason_closed is not None
        assert trainer.run_step()[0].metrics["overlap/open"] == 0.0
    finally:
        trainer.close()


def switch_interval(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Seconds for which this thread may keep the interpreter from others."""
    return [sys.getswitchinterval()] * len(completion_ids)


def test_rewards_in_python_cannot_hold_decoding_up_for_long(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    trainer = Trainer(_config(tmp_path, {}, rewards={"reward_funcs": [f"{__file__}:switch_interval"]}))
    try:
        _, outcome = trainer.run_step()
    finally:
        trainer.close()
    rewards = [reward for group in outcome.groups for reward in group.rewards]
    assert rewards == pytest.approx([SWITCH_S] * len(rewards))
    assert sys.getswitchinterval() == before
