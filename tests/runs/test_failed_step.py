"""A run that fails in the middle of a step keeps every finished step, and goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollplex.config import Config
from rollplex.errors import RewardError, StateError
from rollplex.runtime.trainer import Trainer, train

FAILING = "ROLLPLEX_TEST_FAILING_GROUP"
FAIL_AT = "ROLLPLEX_TEST_FAIL_AT"  # the reward's file is loaded as a module of its own: no variable is shared with it


def failing_reward(completion_ids, trainer_state, **_):
    """Raises in the step named by the test."""
    if os.environ.get(FAIL_AT) == str(trainer_state.global_step):
        raise OSError("the answer key is on a disk that went away")
    return [float(sum(ids) % 7) for ids in completion_ids]


def _config(output_dir: Path, resume: str | None = None):
    return Config.model_validate(
        {
            "run": {"output_dir": str(output_dir), "num_threads": 1, "log_completions_steps": 0, "save_steps": 0,
                    "resume_from_checkpoint": resume},
            "model": {"build": {"family": "qwen2_5_vl"}},
            "data": {"task": "mixed", "image_size": 56},
            "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 4},
            "rewards": {"reward_funcs": [f"{__file__}:failing_reward"]},
            "train": {"max_steps": 4, "learning_rate": 1e-3},
        }
    )  # fmt: skip


def _steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_failure_in_a_step_keeps_the_steps_before_and_resumes_bitwise(tmp_path, monkeypatch):
    train(_config(tmp_path / "whole"))
    monkeypatch.setenv(FAIL_AT, "2")
    with pytest.raises(RewardError, match="answer key") as caught:
        train(_config(tmp_path / "run"))
    assert any("checkpoint-2" in note for note in caught.value.__notes__)
    assert _steps(tmp_path / "run") == [1, 2]
    monkeypatch.delenv(FAIL_AT)
    train(_config(tmp_path / "run", "auto"))
    assert _steps(tmp_path / "run") == [1, 2, 3, 4]
    whole, resumed = (load_file(tmp_path / r / "checkpoint-4" / "model.safetensors") for r in ("whole", "run"))
    assert all(whole[name].equal(resumed[name]) for name in whole)


def test_failure_in_the_first_step_leaves_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv(FAIL_AT, "0")
    with pytest.raises(RewardError):
        train(_config(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


async def one_fails_the_other_sleeps(completion_ids, **_):
    """Half a minute for every group but one, which fails at once."""
    calls = vars(one_fails_the_other_sleeps).setdefault(os.environ[FAILING], [])
    calls.append(completion_ids)
    if len(calls) == int(os.environ[FAILING]):
        raise OSError("no answer key")
    await asyncio.sleep(30.0)
    return [0.0] * len(completion_ids)


def _of(config: Config, **sections: dict[str, Any]) -> Config:
    tree = config.model_dump(mode="json")
    for section, options in sections.items():
        tree[section] |= options
    return Config.model_validate(tree)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_reward_that_fails_is_heard_before_others_of_its_unit_have_answered(tmp_path, monkeypatch, failing):
    monkeypatch.setenv(FAILING, str(failing))
    slow = {"reward_funcs": [f"{__file__}:one_fails_the_other_sleeps"]}
    config = _of(_config(tmp_path / "run"), rewards=slow, schedule={"unit_tokens": 4096})
    begin_s = time.monotonic()
    with pytest.raises(RewardError, match="no answer key"):
        train(config)
    assert time.monotonic() - begin_s < 25.0


def test_a_step_that_fails_while_decoding_gives_the_cpu_threads_back(tmp_path, monkeypatch):
    monkeypatch.setenv(FAIL_AT, "0")
    before = torch.get_num_threads()
    options = {"name": "stream", "overlap": "on", "decode_threads": 1, "unit_tokens": 1}
    config = _of(_config(tmp_path / "run"), run={"num_threads": 2}, schedule=options)
    trainer = Trainer(config)
    try:
        with pytest.raises(RewardError):
            trainer.run_step()
        assert torch.get_num_threads() == 2
    finally:
        trainer.close()
        torch.set_num_threads(before)


def test_a_pass_that_was_left_behind_forbids_every_later_step(tmp_path):
    """Also one that gives the window nothing to do: the pass may still add to its gradients."""
    trainer = Trainer(_of(_config(tmp_path / "run"), schedule={"overlap": "off"}))
    try:
        trainer.learner.window.left_behind = "actor_response of group 1"
        with pytest.raises(StateError, match="actor_response of group 1 of a step that failed still runs"):
            trainer.run_step()
    finally:
        trainer.close()
