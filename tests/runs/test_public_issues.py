"""Faults that users met elsewhere (research: public_issues.md), as whole runs of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rollplex.config import Config
from rollplex.errors import SamplingExhausted
from rollplex.runtime.trainer import Trainer, train


def varied_reward(completion_ids, **_):
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def equal_reward(completion_ids, **_):
    """No group teaches anything."""
    return [1.0] * len(completion_ids)


def _config(output_dir: Path, reward=varied_reward, family: str = "qwen2_5_vl", **sections):
    tree = {
        "run": {"output_dir": str(output_dir), "num_threads": 1, "log_completions_steps": 1},
        "model": {"build": {"family": family}},
        "data": {"task": "mixed", "image_size": 56, "num_rows": 8},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6},
        "rewards": {"reward_funcs": [f"{__file__}:{reward.__name__}"]},
        "train": {"max_steps": 2, "learning_rate": 1e-3},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(json.loads(json.dumps(tree)))


def _weights(run: Path, step: int):
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_g06_pixels_reach_the_update(tmp_path, family, share_prefix):
    """The vision tower moves; that it moves by the right amount is what tests/numerics judges."""
    config = _config(tmp_path / "run", family=family, train={"share_prefix": share_prefix, "max_steps": 1})
    trainer = Trainer(config)
    try:
        visual = {n: p.detach().clone() for n, p in trainer.session.loaded.model.named_parameters() if "visual" in n}
        trainer.run_step()
        now = dict(trainer.session.loaded.model.named_parameters())
        still = [name for name, before in visual.items() if before.equal(now[name])]
    finally:
        trainer.close()
    assert len(visual) > 10
    assert still == []


def test_g25_exhausted_dynamic_sampling_trains_on_what_there_is(tmp_path):
    config = _config(
        tmp_path / "run",
        equal_reward,
        algorithm={"dynamic_sampling": "resample", "dynamic_sampling_max_rounds": 2},
        train={"max_steps": 1},
    )
    trainer = Trainer(config)
    try:
        report, outcome = trainer.run_step()
    finally:
        trainer.close()
    assert len(outcome.groups) == 4
    assert report.metrics["dynamic_sampling/accept_rate"] == 0.0
    assert report.metrics["dynamic_sampling/rounds"] == 2.0
    assert report.metrics["grad_norm"] == 0.0


def test_g25_exhausted_dynamic_sampling_skips_the_step(tmp_path):
    algorithm = {"dynamic_sampling": "resample", "dynamic_sampling_max_rounds": 1, "dynamic_sampling_exhausted": "skip"}
    config = _config(tmp_path / "run", equal_reward, algorithm=algorithm)
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all("grad_norm" not in line and line["dynamic_sampling/accept_rate"] == 0.0 for line in lines)


def test_g25_exhausted_dynamic_sampling_stops_with_the_option_named(tmp_path):
    algorithm = {"dynamic_sampling": "resample", "dynamic_sampling_max_rounds": 1, "dynamic_sampling_exhausted": "stop"}
    config = _config(tmp_path / "run", equal_reward, algorithm=algorithm)
    with pytest.raises(SamplingExhausted, match="dynamic_sampling_exhausted"):
        train(config)


def test_g25_mixed_groups_replace_equal_ones(tmp_path):
    """With a reward that is equal in some groups only, the step still learns from as many groups as asked."""
    algorithm = {"dynamic_sampling": "resample", "dynamic_sampling_max_rounds": 8}
    config = _config(tmp_path / "run", sometimes_equal_reward, algorithm=algorithm, train={"max_steps": 1})
    trainer = Trainer(config)
    try:
        report, outcome = trainer.run_step()
    finally:
        trainer.close()
    assert 0.0 < report.metrics["dynamic_sampling/accept_rate"] < 1.0
    assert len(outcome.groups) == 4
    assert all(any(advantage != 0.0 for advantage in group.advantages) for group in outcome.groups)


_calls = iter(range(10**6))


def sometimes_equal_reward(completion_ids, **_):
    """Every second group has equal rewards."""
    if next(_calls) % 2:
        return [0.0] * len(completion_ids)
    return [float(number) for number, _ in enumerate(completion_ids)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_g28_frozen_vision_stays_has_no_state_and_is_encoded_once(tmp_path, family):
    config = _config(
        tmp_path / "run",
        family=family,
        model={"freeze_vision": True},
        train={"max_steps": 4},
        algorithm={"beta": 0.04},
        run={"save_steps": 1},
    )
    train(config)
    first, last = _weights(tmp_path / "run", 1), _weights(tmp_path / "run", 4)
    visual = [name for name in first if "visual" in name]
    assert visual
    assert all(first[name].equal(last[name]) for name in visual)
    assert any(not first[name].equal(last[name]) for name in first if "visual" not in name)
    state = load_file(tmp_path / "run" / "checkpoint-4" / "optimizer.safetensors")
    assert not [name for name in state if "visual" in name]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # 8 rows, 4 a step: every row with media once in the first epoch (rollout, reference and update share), then never
    assert sum(line["vision/encode_calls"] for line in lines[:2]) == 6
    assert [line["vision/encode_calls"] for line in lines[2:]] == [0.0, 0.0]


def test_g29_same_seed_same_run(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        train(_config(run))
    a, b = (_weights(run, 2) for run in runs)
    assert all(a[name].equal(b[name]) for name in a)
    pages = [(run / "completions" / "step-2.jsonl").read_text() for run in runs]
    assert pages[0] == pages[1]


def test_g29_another_seed_another_run(tmp_path):
    train(_config(tmp_path / "a"))
    train(_config(tmp_path / "b", run={"seed": 1}))
    a, b = _weights(tmp_path / "a", 2), _weights(tmp_path / "b", 2)
    assert any(not a[name].equal(b[name]) for name in a)
