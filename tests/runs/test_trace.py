"""`rollplex train` with run.trace_steps: what ran when, in a file that Perfetto opens."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import CheckpointError
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.runtime.trainer import train
from rollplex.trace import from_jsonl

SLOW_S = 0.05


def slow_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Takes a known time and differs between responses."""
    time.sleep(SLOW_S)
    return [float(sum(ids) % 7) for ids in completion_ids]


def _config(folder: Path, *overrides: str) -> Config:
    options = [
        f"output_dir={folder}",
        f"reward_funcs=[{__file__}:slow_reward]",
        "num_threads=1",
        "prompts_per_step=2",
        "num_generations=2",
        "max_completion_length=4",
        "log_completions_steps=0",
    ]
    return load_config(packaged_recipe("tiny_qwen2_5_vl"), [*options, *overrides])


PASSES = {"prefill", "actor_response", "prefix_backward", "optimizer", "publish"}


def _events(folder: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert trace["otherData"] == {"run": folder.name, "source": "measured"}
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [event for event in events if event["ph"] == "X"], lanes


def test_chosen_steps_are_traced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(_config(folder, "max_steps=3", "trace_steps=[2,3]"))
    events, lanes = _events(folder)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {event["args"]["step"] for event in events} == {2, 3}
    for step in (2, 3):
        own = [event for event in events if event["args"]["step"] == step]
        measured = metrics[step - 1]
        main: dict[str, float] = {}
        for event in own:
            if lanes[event["tid"]] == "main":
                main[event["args"]["phase"]] = main.get(event["args"]["phase"], 0.0) + event["dur"] / 1e6
        assert set(main) == {"prompts", *PASSES}
        for name, seconds in main.items():
            assert seconds == pytest.approx(measured[f"timing_s/{name}"], abs=1e-3)
        ids = [(step - 1) * 2, (step - 1) * 2 + 1]
        decode, reward = (
            {event["args"]["group"]: event for event in own if event["cat"] == lane} for lane in ("decode", "reward")
        )
        assert sorted(decode) == sorted(reward) == ids
        # engine iterations alone; a group's span also holds what the main thread did between them
        assert 0 < measured["timing_s/decode"] <= measured["step_time"]
        for group in ids:  # a reward starts when its group is complete, and takes at least what the function takes
            assert reward[group]["ts"] == pytest.approx(decode[group]["ts"] + decode[group]["dur"], abs=10)
            assert reward[group]["dur"] / 1e6 >= SLOW_S
        begin, end = min(e["ts"] for e in own), max(e["ts"] + e["dur"] for e in own)
        assert (end - begin) / 1e6 <= measured["step_time"] + 1e-3
    assert from_jsonl((folder / "trace.jsonl").read_text(encoding="utf-8"))


def test_without_the_option_there_is_no_trace(tmp_path: Path) -> None:
    train(_config(tmp_path / "run", "max_steps=1"))
    assert not list((tmp_path / "run").glob("trace.*"))


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    overrides = ["max_steps=2", "save_steps=1", "trace_steps=[1,2]"]
    train(_config(folder, *overrides))
    before, _ = _events(folder)
    shutil.rmtree(folder / "checkpoint-2")
    train(_config(folder, *overrides, "resume_from_checkpoint=auto"))
    after, _ = _events(folder)
    # the prompts make one unit, each pass of which has a span, publish two: at the end of a step, and when the next
    # rollout opens its engine; decode and reward have one per prompt
    assert len(after) == len(before) == 2 * (1 + len(PASSES) + 1 + 2 * 2)
    assert [e for e in after if e["args"]["step"] == 1] == [e for e in before if e["args"]["step"] == 1]
    assert [e for e in after if e["args"]["step"] == 2] != [e for e in before if e["args"]["step"] == 2]
    (folder / "trace.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"trace.jsonl is damaged \(line 1 is not a span"):
        train(_config(folder, *overrides, "resume_from_checkpoint=auto"))
