"""`rollplex train` with rollout.engine=vllm, from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rollplex

RECIPE = Path(rollplex.__file__).parent / "recipes" / "tiny_qwen3_vl.yaml"
OPTIONS = {
    "rollout.engine": "vllm",
    "rollout.vllm.enforce_eager": "on",
    "rollout.vllm.kv_cache_gib": "0.25",
    "rollout.temperature": "0.8",
    "model.build.num_heads": "2",  # heads of 32: the least that vLLM's CPU kernels take
    "model.build.num_kv_heads": "1",
    "train.max_steps": "2",
    "run.save_steps": "1",
}


@pytest.mark.parametrize("servers", [0, 1])
def test_two_steps(tmp_path: Path, servers: int) -> None:
    """Mixed rows; the metric says how far behaviour log-probs are from the trainer's. A server gets the second
    step's weights while the first step's checkpoint is written."""
    overrides = [f"{key}={value}" for key, value in OPTIONS.items()] + [f"rollout.vllm.servers={servers}"]
    command = [
        str(Path(sys.executable).with_name("rollplex")),
        "train",
        str(RECIPE),
        f"run.output_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line.get("metrics", line) for line in lines]
    gaps = [step["sampling/sampling_logp_difference/max"] for step in steps]
    assert len(gaps) == 2 and max(gaps) < 1e-5
    assert steps[0]["publish/pushed_bytes"] > 0 == steps[1]["publish/pushed_bytes"]
    assert min(steps[1]["publish/aliased_bytes"], steps[1]["publish/packed_bytes"], steps[1]["publish/seconds"]) > 0
    # A server began before it was waited for; an engine in this process did all of it at that time.
    assert (steps[1]["timing_s/publish"] < steps[1]["publish/seconds"]) == (servers == 1)
