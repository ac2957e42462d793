"""Counters of a run: rows left out, over a resume too; evaluations, each once and of as many rows as it says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rollplex.config import Config
from rollplex.runtime.trainer import train

SHORT, LONG = "one plus two?", "and so on " * 40


def counted_reward(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
    """Different rewards for the responses of a group; notes every evaluation (one response)."""
    if len(prompts) == 1:
        with Path(os.environ["EVALUATED"]).open("a") as file:  # a reward file is a module of its own
            file.write(prompts[0] + "\n")
    return [float(sum(ids) % 7) for ids in completion_ids]


def _config(folder: Path, resume: str | None = None, **train_options: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": str(folder / "run"), "num_threads": 1, "log_completions_steps": 0, "save_steps": 1,
                    "eval_steps": 2, "resume_from_checkpoint": resume},
            "model": {"build": {}},
            "data": {"task": "files", "path": str(folder / "{split}.jsonl"), "eval_split": "test", "shuffle": False,
                     "max_prompt_tokens": 60, "overlong": "drop"},
            "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3},
            "rewards": {"reward_funcs": [f"{__file__}:counted_reward"]},
            "train": train_options,
        }
    )  # fmt: skip


def _write(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def test_dropped_rows_and_evaluations_are_counted_as_they_happen(tmp_path, monkeypatch):
    evaluated = tmp_path / "evaluated.txt"
    monkeypatch.setenv("EVALUATED", str(evaluated))
    _write(tmp_path / "train.jsonl", [SHORT, LONG, SHORT, SHORT, LONG, SHORT])
    _write(tmp_path / "test.jsonl", [SHORT, LONG, SHORT])
    train(_config(tmp_path, max_steps=1))
    assert evaluated.read_text().splitlines() == [SHORT] * 2  # at the end; one of the three rows is over the limit
    result = train(_config(tmp_path, resume="auto", max_steps=4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["data/dropped_rows"] for line in lines] == [1.0, 2.0, 3.0, 4.0]
    assert [line.get("eval_rows") for line in lines] == [None, 2.0, None, 2.0]
    assert result.evaluation == {key: value for key, value in lines[-1].items() if key.startswith("eval_")}
    assert len(evaluated.read_text().splitlines()) == 2 + 2 * 2  # not again after the last step
