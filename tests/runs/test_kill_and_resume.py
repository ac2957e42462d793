"""A run killed by SIGKILL at any moment and resumed ends with the same bits as one that was never killed."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

STEPS = 6
TRIALS = 10
DEADLINE_S = 250.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["rollplex.runtime.trainer", "rollplex.tasks.synthetic", "transformers.models.qwen3_vl"])


def _config(output_dir: Path, resume: str | None):
    from rollplex.config import Config

    return Config.model_validate(
        {
            "run": {"output_dir": str(output_dir), "save_steps": 1, "num_threads": 2, "log_completions_steps": 3,
                    "save_total_limit": 2, "resume_from_checkpoint": resume, "seed": 5},
            "model": {"build": {"family": "qwen3_vl"}},
            "data": {"task": "mixed", "image_size": 56},
            "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6},
            "algorithm": {"beta": 0.04, "steps_per_generation": 2},
            "rewards": {"reward_funcs": [f"{__file__}:length_reward"]},
            "train": {"max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2},
            "warm_start": {"steps": 2, "batch_size": 4},
            "schedule": {"name": "rollplex", "overlap": "on", "unit_tokens": 64},  # killed inside windows too
        }
    )  # fmt: skip


def length_reward(completion_ids, **_):
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def _run(output_dir: Path, resume: str | None) -> None:
    from rollplex.runtime.trainer import train

    train(_config(output_dir, resume))


def _start(output_dir: Path, resume: str | None):
    process = context.Process(target=_run, args=(output_dir, resume), daemon=True)
    process.start()
    return process


def _finish(output_dir: Path, resume: str | None) -> None:
    process = _start(output_dir, resume)
    process.join(DEADLINE_S)
    assert process.exitcode == 0, f"run in {output_dir} ended with {process.exitcode}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    _finish(folder / "warm-up", None)  # imports and disk caches: the next run's time is that of the others
    begin = time.monotonic()
    _finish(folder / "run", None)
    return folder / "run", time.monotonic() - begin


def _tensors(run: Path):
    checkpoint = run / f"checkpoint-{STEPS}"
    return {
        f"{name}/{key}": t
        for name in ("model", "optimizer")
        for key, t in load_file(checkpoint / f"{name}.safetensors").items()
    }


def _metrics(run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "step_time", "overlap/")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_killed_and_resumed_equals_whole(trial, whole, tmp_path):
    reference, seconds = whole
    moment = random.Random(trial).uniform(0.05, 0.95) * seconds
    process = _start(tmp_path / "run", None)
    process.join(moment)
    process.kill()
    process.join(DEADLINE_S)
    _finish(tmp_path / "run", "auto")

    expected, found = _tensors(reference), _tensors(tmp_path / "run")
    assert expected.keys() == found.keys()
    differing = [key for key in expected if not expected[key].equal(found[key])]
    assert differing == []
    metrics = _metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics == _metrics(reference)


def test_the_comparison_can_fail(whole, tmp_path):
    """Another seed gives other bits: the test above compares something that moves."""
    reference, _ = whole
    before = load_file(reference / "warm-start" / "model.safetensors")
    after = load_file(reference / f"checkpoint-{STEPS}" / "model.safetensors")
    assert any(not before[key].equal(after[key]) for key in before)
