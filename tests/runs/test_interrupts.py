"""Ctrl-C and SIGTERM at the worst moments: a step whose weights have moved ends first, and no finished step is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollplex.config import Config
from rollplex.runtime.termination import StepEnd, exit_on_sigterm
from rollplex.runtime.trainer import Trainer, train

STEPS = 4
ENDS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
SENT = "ROLLPLEX_TEST_SENT"  # the reward's file is loaded as a module of its own: no variable is shared with it


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """A shell's background job ignores SIGINT, and so does everything that it starts, these tests included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def length_reward(completion_ids, **_):
    """Differs between responses, so that every step moves the weights."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def interrupting_reward(completion_ids, trainer_state, **_):
    if trainer_state.global_step == 2 and SENT in os.environ:  # the first to see 2 steps is the evaluation after them
        signal.pthread_kill(threading.main_thread().ident, int(os.environ.pop(SENT)))
    return length_reward(completion_ids)


def _config(output_dir: Path, resume: str | None = None, reward: str = "length_reward", **sections) -> Config:
    options = {
        "run": {"output_dir": str(output_dir), "num_threads": 1, "resume_from_checkpoint": resume, "seed": 5},
        "model": {"build": {"family": "qwen3_vl", "num_layers": 1}},
        "data": {"task": "counting", "image_size": 28},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
        "algorithm": {"steps_per_generation": 2},
        "rewards": {"reward_funcs": [f"{__file__}:{reward}"]},
        "train": {"max_steps": STEPS, "learning_rate": 1e-3},
    }
    for section, values in sections.items():
        options[section] = {**options.get(section, {}), **values}
    return Config.model_validate(options)


def _logged(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def _ended(config: Config, numbers: list[signal.Signals], update: int, error: type[BaseException]) -> None:
    """Run, with `numbers` sent when optimizer step `update` has moved the weights; it must end with `error`."""
    trainer = Trainer(config)

    def moved(*_: object) -> None:
        if trainer.optimizer.num_steps == update:
            for number in numbers:
                os.kill(os.getpid(), number)

    trainer.optimizer.adamw.register_step_post_hook(moved)
    with pytest.raises(error):
        trainer.train()


@pytest.mark.parametrize("update", [3, 4], ids=["first of two", "last of two"])
@pytest.mark.parametrize(("number", "error"), ENDS)
def test_a_step_whose_weights_have_moved_ends_first_and_is_kept(tmp_path, capfd, number, error, update) -> None:
    before = signal.getsignal(number)
    _ended(_config(tmp_path / "run"), [number], update, error)
    assert signal.getsignal(number) is before
    assert "ending after this step" in capfd.readouterr().err
    assert _logged(tmp_path / "run") == [1, 2]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    train(_config(tmp_path / "run", "auto"))
    train(_config(tmp_path / "whole"))
    resumed, whole = (_weights(tmp_path / run / f"checkpoint-{STEPS}") for run in ("run", "whole"))
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_at_once_and_keeps_what_was_saved(tmp_path, first) -> None:
    _ended(_config(tmp_path / "run", run={"save_steps": 1}), [first, signal.SIGINT], 3, KeyboardInterrupt)
    assert _logged(tmp_path / "run") == [1]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize(("first", "error"), ENDS)
def test_a_second_sigterm_waits_for_the_step_too(tmp_path, first, error) -> None:
    _ended(_config(tmp_path / "run"), [first, signal.SIGTERM], 3, error)
    assert _logged(tmp_path / "run") == [1, 2]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_second_sigterm_does_not_interrupt_the_rescue(tmp_path, monkeypatch) -> None:
    trainer, step, save = Trainer(_config(tmp_path / "run")), Trainer.run_step, Trainer.save

    def interrupted(self, *args):
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    def again(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self, *args)

    monkeypatch.setattr(Trainer, "run_step", interrupted)
    monkeypatch.setattr(Trainer, "save", again)
    with exit_on_sigterm(), pytest.raises(SystemExit):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(("number", "error"), ENDS)
def test_an_interrupted_evaluation_does_not_undo_its_step(tmp_path, monkeypatch, number, error) -> None:
    monkeypatch.setenv(SENT, str(int(number)))
    config = _config(
        tmp_path / "run",
        reward="interrupting_reward",
        run={"eval_steps": 2, "eval_rows": 200},
        data={"eval_split": "test"},
    )
    with pytest.raises(error):
        Trainer(config).train()
    assert SENT not in os.environ
    assert _logged(tmp_path / "run") == [1, 2]
    assert "eval" not in (tmp_path / "run/metrics.jsonl").read_text()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StepEnd(lambda: False).handling():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
