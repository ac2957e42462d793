"""Memory as planned: bytes counted from sizes against bytes that the allocator gave, and plans that are carried out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.allocations import AllocationCounter
from rollplex.runtime.trainer import Trainer, train

TOLERANCE = 0.10
STRAY_BYTES = 4096
EVERY_STEP = [1, 2, 3, 4]


def spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward under which every group teaches something."""
    return [float(number % 2) for number in range(len(completions))]


def _config(tmp_path: Any, **options: Any) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(tmp_path / "run"), "memory_steps": EVERY_STEP, "num_threads": 2},
        "model": {
            "build": {"family": "qwen2_5_vl", "hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
        },
        "data": {"task": "counting", "image_size": 112, "num_rows": 8},
        "rewards": {"reward_funcs": [f"{__file__}:spread"]},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 48},
        "algorithm": {"beta": 0.04},
        "schedule": {"overlap": "off"},
        "train": {"max_steps": 4, "learning_rate": 1e-3},
    }
    for name, value in options.items():
        section, option = name.split("__")
        if isinstance(value, dict):
            tree[section][option] = {**tree[section].get(option, {}), **value}
        else:
            tree.setdefault(section, {})[option] = value
    return Config.model_validate(tree)


def _steps(config: Config, count: int = 4) -> tuple[Trainer, list[Any]]:
    trainer = Trainer(config)
    try:
        return trainer, [trainer.run_step()[1].ledger for _ in range(count)]
    finally:
        trainer.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model__build": {"family": "qwen3_vl"}},
        {"model__build": {"family": "qwen3_vl"}, "data__task": "motion"},
        {"model__build": {"family": "qwen3_vl"}, "data__task": "mixed"},
        {"model__build": {"hidden_size": 64, "num_layers": 8}, "rollout__max_completion_length": 16},
        {"train__prefix_activations": "checkpoint"},
        {"model__build": {"family": "qwen3_vl"}, "train__prefix_activations": "recompute"},
        {"data__image_size": 336},
        {"data__image_size": 336, "train__prefix_activations": "checkpoint"},
        {"model__dtype": "bfloat16"},
        {"model__build": {"family": "qwen3_vl"}, "model__dtype": "bfloat16"},
        {"model__freeze_vision": True},
        {"algorithm__beta": 0.0},
        {"rollout__max_decode_rows": 5, "rollout__num_generations": 8, "rollout__max_completion_length": 128},
        {
            "rollout__max_decode_rows": 32,
            "rollout__num_generations": 32,
            "rollout__max_completion_length": 96,
            "train__micro_batch_tokens": 128,
        },
        {"schedule__name": "rollplex", "schedule__overlap": "on", "schedule__decode_threads": 1},
        {"schedule__unit_tokens": 64, "train__micro_batch_tokens": 256},
        {"data__image_size": 336, "schedule__chunk_tokens": 32},
        {"data__image_size": 336, "schedule__chunk_tokens": 32, "model__build": {"family": "qwen3_vl"}},
        {"data__image_size": 336, "schedule__chunk_tokens": 32, "train__prefix_activations": "checkpoint"},
        {"data__image_size": 336, "schedule__chunk_tokens": 32, "train__prefix_activations": "recompute"},
        {"data__image_size": 336, "schedule__chunk_tokens": 50, "model__dtype": "bfloat16"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()) or "image",
)
def test_planned_peak_is_near_the_measured_one(tmp_path: Any, options: dict[str, Any]) -> None:
    _, ledgers = _steps(_config(tmp_path, **options))
    for ledger in ledgers[1:]:
        assert ledger.measured_over_planned == pytest.approx(1.0, abs=TOLERANCE), "\n".join(ledger.lines())


def test_measured_bytes_stay_the_same_for_50_steps(tmp_path: Any) -> None:
    """Nothing is kept from step to step: the same prompts and lengths take the same bytes, but for a few that other
    threads allocate or release."""
    config = _config(
        tmp_path,
        run__memory_steps=list(range(1, 51)),
        train__max_steps=50,
        train__learning_rate=0.0,
        rollout__temperature=1e-6,  # with the weights as they are: the same responses in every epoch
        model__build={"num_layers": 2, "hidden_size": 64},
        data__num_rows=4,
        data__shuffle=False,
        rollout__max_completion_length=8,
    )
    _, ledgers = _steps(config, 50)
    peaks = [ledger.measured_peak_bytes for ledger in ledgers[1:]]
    assert max(peaks) - min(peaks) <= STRAY_BYTES
    assert max(abs(ledger.left_bytes) for ledger in ledgers[1:]) <= STRAY_BYTES


@pytest.fixture(scope="module")
def uncapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    trainer, _ = _steps(_config(tmp_path_factory.mktemp("uncapped"), data__max_prompt_tokens=64))
    return {name: weight.detach() for name, weight in trainer.session.loaded.model.named_parameters()}


def _smallest(tmp_path: Any, **options: Any) -> int:
    with pytest.raises(ConfigError, match="no memory plan fits") as caught:
        Trainer(_config(tmp_path, **{"data__max_prompt_tokens": 64, "memory__cap_gib": 1e-6} | options))
    return int(str(caught.value).split("(")[1].split(" bytes")[0])


def test_a_plan_under_the_smallest_cap_is_carried_out_and_changes_no_bit(
    tmp_path: Any, uncapped: dict[str, torch.Tensor]
) -> None:
    cap = _smallest(tmp_path)
    config = _config(
        tmp_path, data__max_prompt_tokens=64, memory__cap_gib=(cap + 1) / 2**30, memory__stream_chunk_mib=1
    )
    trainer, ledgers = _steps(config)
    plan = trainer.learner.memory.plan
    assert plan is not None and plan.peak_bytes <= cap + 1
    moved = {name: str(choice.policy) for name, choice in plan.choices.items() if choice.policy.name != "KEEP"}
    assert moved["reference weights"] == "offload"
    assert moved["optimizer state"] == "stream in chunks"
    assert moved["prefix activations"] == "recompute"
    for ledger in ledgers:  # the first too: what the plan holds elsewhere is away when it begins
        assert ledger.measured_peak_bytes <= cap
        assert ledger.measured_over_planned == pytest.approx(1.0, abs=TOLERANCE), "\n".join(ledger.lines())
    weights = dict(trainer.session.loaded.model.named_parameters())
    assert all(torch.equal(weight, uncapped[name]) for name, weight in weights.items())


def _check_resumed(tmp_path: Any, options: dict[str, Any], uncapped: dict[str, torch.Tensor]) -> None:
    """The run's checkpoint-2 goes on with `options` to the weights that an unbroken, uncapped run ends with."""
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    trainer, _ = _steps(_config(tmp_path, **options, run__resume_from_checkpoint=checkpoint), 2)
    weights = dict(trainer.session.loaded.model.named_parameters())
    assert all(torch.equal(weight, uncapped[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    "options",
    [
        # One prompt of the longest fills a pass, and its responses a tenth of a micro-batch; these are all in one.
        {"data__max_prompt_tokens": 1000, "rollout__prompts_per_step": 8, "rollout__max_completion_length": 96},
        # One of the longest to a pass, but three of these.
        {"data__max_prompt_tokens": 540, "data__image_size": 448, "rollout__max_completion_length": 8},
    ],
    ids=["responses", "prompts"],
)
def test_shorter_prompts_keep_to_the_cap_too(tmp_path: Any, options: dict[str, Any]) -> None:
    """They fill passes and micro-batches better than the longest do, of which fewer fit into a budget."""
    cap = _smallest(tmp_path, **options)
    _, ledgers = _steps(_config(tmp_path, memory__cap_gib=(cap + 1) / 2**30, **options), 2)
    for ledger in ledgers:
        assert ledger.measured_peak_bytes <= cap, "\n".join(ledger.lines())


def test_stream_keeps_to_its_cap_with_the_window_closed_too(tmp_path: Any) -> None:
    """Groups are then done with one after another: the reference is back while the gradients of the first are there."""
    own: dict[str, Any] = {"schedule__name": "stream", "schedule__unit_tokens": 32}
    cap = _smallest(tmp_path, **own)
    options = {"data__max_prompt_tokens": 64, "memory__cap_gib": (cap + 1) / 2**30, "memory__stream_chunk_mib": 1}
    _, ledgers = _steps(_config(tmp_path, **own, **options))
    for ledger in ledgers:
        assert ledger.measured_peak_bytes <= cap, "\n".join(ledger.lines())


def test_a_capped_run_resumes_to_the_same_bits(tmp_path: Any, uncapped: dict[str, torch.Tensor]) -> None:
    options = {"data__max_prompt_tokens": 64, "memory__cap_gib": (_smallest(tmp_path) + 1) / 2**30}
    train(_config(tmp_path, **options, run__save_steps=2, train__max_steps=4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == EVERY_STEP
    _check_resumed(tmp_path, options, uncapped)


@pytest.mark.parametrize("capped_first", [True, False])
def test_a_run_resumes_with_a_cap_or_without_whatever_it_had(
    tmp_path: Any, uncapped: dict[str, torch.Tensor], capped_first: bool
) -> None:
    own: dict[str, Any] = {"data__max_prompt_tokens": 64}
    cap = {"memory__cap_gib": (_smallest(tmp_path) + 1) / 2**30, "memory__stream_chunk_mib": 1}
    options = [{**own, **cap}, {**own, "run__memory_steps": ()}]
    first, second = options if capped_first else reversed(options)
    train(_config(tmp_path, **first, run__save_steps=2))
    _check_resumed(tmp_path, second, uncapped)


LARGE = {
    "data__image_size": 224,
    "data__max_prompt_tokens": 96,
    "rollout__prompts_per_step": 8,
    "rollout__max_decode_rows": 8,
    "schedule__unit_tokens": 1,
}


@pytest.mark.parametrize("large", [{}, LARGE], ids=["small", "few rows, a prompt a pass"])
def test_an_evaluation_under_a_cap_holds_no_more_than_the_cap(tmp_path: Any, large: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"model__build": {"hidden_size": 64, "num_layers": 2}, "rollout__max_completion_length": 8}
    shape |= large
    cap = _smallest(tmp_path, **shape)
    options = {"data__num_rows": 64, "data__eval_split": "test", "run__memory_steps": ()}
    options |= {} if large else {"data__max_prompt_tokens": 64}
    trainer = Trainer(_config(tmp_path, **shape, **options, memory__cap_gib=(cap + 1) / 2**30))
    try:
        trainer.run_step()
        counter = AllocationCounter(trainer.session.policy.device, trainer.learner._held_bytes)
        with counter.counting():
            assert trainer.evaluate()["eval_rows"] > 16
        assert counter.trace().peak_bytes <= cap
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model__lora": {"r": 4}}, "model.lora is set"),
        ({"algorithm__dynamic_sampling": "resample"}, "algorithm.dynamic_sampling is resample"),
        ({"train__share_prefix": False}, "train.share_prefix is off"),
        ({"algorithm__num_iterations": 2}, "several optimizer steps per rollout"),
        ({"schedule__name": "rollplex.schedule.rollplex:Rollplex"}, "rollplex.schedule.rollplex:Rollplex is not known"),
        ({"memory__devices": 2, "run__memory_steps": (), "memory__cap_gib": 1.0}, "memory.devices is above 1"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Trainer(_config(tmp_path, **options))


def test_a_cap_without_a_longest_prompt_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens"):
        Trainer(_config(tmp_path, memory__cap_gib=1.0))
